"""A sweep's record says what was run: neither a plan nor a machine that cannot run it takes its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from experiments import sweep
from experiments.job import Outcome
from experiments.sweep_record import is_plan

SMOKE = "sweeps/ruler_32k-smoke"


@pytest.fixture(autouse=True)
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of a dry run are planned, others complete; each leaves its log."""
    GlobalHydra.instance().clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def launch(jobs: Any, root: Path, stems: Any, report: Any) -> None:
        for position, (job, stem) in enumerate(zip(jobs, stems, strict=True)):
            planned = "dry_run=true" in job.overrides
            stem.with_suffix(".log").write_text("the plan" if planned else "the run")
            reason = "3 samples to run, 2732 prompt tokens" if planned else None
            report(position, Outcome("planned", reason) if planned else Outcome("complete", None, f"run-{position}"))

    monkeypatch.setattr(sweep, "launch_here", launch)


def start(out: Path, *arguments: str) -> int:
    return sweep.run_sweep(["experiment=ruler_32k", f"out={out}", *arguments])


def statuses(path: Path) -> list[str]:
    return [job["status"] for job in json.loads(path.read_text())["jobs"]]


def test_a_plan_leaves_the_record_and_the_logs_of_what_was_run(tmp_path: Path) -> None:
    # The record of a finished recipe then said dry_run=true, and its logs were the plan's.
    record, log = tmp_path / f"{SMOKE}.json", tmp_path / SMOKE / "job-000.log"
    assert start(tmp_path, "size=smoke") == 0
    finished = record.read_bytes()
    assert start(tmp_path, "size=smoke", "dry_run=true") == 0
    assert record.read_bytes() == finished
    assert log.read_text() == "the run"
    assert statuses(tmp_path / SMOKE / "plan.json") == ["planned"] * 6
    assert (tmp_path / SMOKE / "plan" / "job-000.log").read_text() == "the plan"


def test_a_plan_is_no_record_where_nothing_was_run(tmp_path: Path) -> None:
    assert start(tmp_path, "size=smoke", "dry_run=true") == 0
    assert not list((tmp_path / "sweeps").glob("*.json"))


def test_a_machine_that_cannot_run_a_recipe_does_not_replace_its_results(tmp_path: Path, capsys: Any) -> None:
    # The skipped job took the place of six finished ones.
    record = tmp_path / "sweeps" / "ruler_32k-small.json"
    assert start(tmp_path, "size=small") == 0
    assert statuses(record) == ["skipped"]
    made = json.dumps({"jobs": [{"overrides": [], "status": "complete", "reason": None, "run_id": "made-on-a-gpu"}]})
    record.write_text(made)
    assert start(tmp_path, "size=small") == 0
    assert record.read_text() == made
    assert "needs a GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sweeps", "expected"),
    [
        ([["method=ffd", "dry_run=true"]], True),
        ([["++dry_run=True"], ["dry_run=true"]], True),
        ([["dry_run=true", "dry_run=false"]], False),
        ([["dry_run=true,false"]], False),
        ([["dry_run=true"], ["method=ffd"]], False),
        ([["method=ffd"]], False),
    ],
)
def test_a_sweep_is_a_plan_if_none_of_its_jobs_can_run(sweeps: list[list[str]], expected: bool) -> None:
    assert is_plan(sweeps) is expected
