"""``make paper-smoke`` in a reduced form: from one recipe's sweep to every table, figure and the report."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ruler_tokenizer import build
from tests.sweep_runs import ROOT
from tests.tiny import tiny_model


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_paper_smoke_fills_the_tables_of_the_recipes_it_runs(tmp_path):
    model = tmp_path / "random-tiny"
    tiny_model("llama", head_dim=32).save_pretrained(model)
    build().save_pretrained(model)
    out = tmp_path / "out"
    stale = out / "analysis" / "figures" / "stale.svg"
    stale.parent.mkdir(parents=True)
    stale.write_text("<svg/>")
    arguments = f"model.path={model} task.tasks=[vt] task.length=1024 tracker=none"
    command = ["make", "paper-smoke", f"OUT={out}", "RECIPES=ruler_32k", f"ARGS={arguments}"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((out / "sweeps" / "ruler_32k-smoke.json").read_text())
    assert [job["status"] for job in record["jobs"]] == ["complete"] * 6
    cells = list(csv.DictReader((out / "analysis" / "tables" / "ruler_32k.csv").open()))
    ran = [cell for cell in cells if cell["row"] == "vt"]
    assert len(ran) == 6
    assert all(cell["value"] and (out / "runs" / cell["run_ids"]).is_dir() for cell in ran)
    assert "random weights" in (out / "analysis" / "tables" / "ruler_32k.md").read_text().lower()
    assert (out / "analysis" / "report.html").stat().st_size > 10_000
    assert not stale.exists()
