"""Records of runs: what they say, and which runs they refuse to put beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis import __main__ as command
from tests.analysis_outputs import write_run

MACHINE = {"device": "GPU", "versions": {"torch": "1"}, "python": "3", "cuda": "13", "git": {"commit": None}}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for name, scores in (("dense", [1.0, 1.0, 0.0, 1.0]), ("ffd", [1.0, 0.0, 0.0, 1.0])):
        add(tmp_path, f"{name}-a", {"name": name}, scores)
    add(tmp_path, "ffd-other", {"name": "ffd"}, [1.0], prompts="others")
    return tmp_path


def add(root: Path, run_id: str, method: dict[str, Any], scores: list[float], **changes: Any) -> None:
    machine = MACHINE | changes.pop("machine", {})
    folder = write_run(root, run_id, method, {"vt": scores}, **changes)
    (folder / "environment.json").write_text(json.dumps(machine | {"command": ["python", "run.py"]}))


def record(out: Path, *arguments: str) -> dict[str, Any]:
    given = ["record", "r", *arguments, "--out", str(out), "--folder", str(out), "--date", "2026-01-01"]
    assert command.main(given) == 0
    return json.loads((out / "r.json").read_text())


def test_rows_say_what_summaries_say_and_compare_prompt_by_prompt(out: Path) -> None:
    made = record(out, "dense-a", "ffd-a", "ffd-other", "--revision", "abc", "--note", "why")
    assert {key: made[key] for key in ("gpu", "revision", "date", "note")} == {
        "gpu": "GPU",
        "revision": "abc",
        "date": "2026-01-01",
        "note": "why",
    }
    dense, ffd, other = made["rows"]
    assert dense["accuracy"]["vt"]["score"] == 75.0
    assert ffd["less_dense"]["vt"]["n"] == 4
    assert ffd["less_dense"]["vt"]["points"] == pytest.approx(-25.0)
    assert "environment" not in ffd
    assert "less_dense" not in dense
    assert "less_dense" not in other  # no prompt in common


def test_a_checkouts_own_revision_is_kept(out: Path) -> None:
    add(out, "ffd-git", {"name": "ffd"}, [1.0], machine={"git": {"commit": "own"}})
    assert record(out, "ffd-git", "--revision", "abc")["revision"] == "own"


def test_runs_of_several_machines_are_refused(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(out, "ffd-cpu", {"name": "ffd"}, [1.0], machine={"device": "cpu"})
    given = ["record", "r", "dense-a", "ffd-cpu", "--out", str(out), "--folder", str(out), "--date", "2026-01-01"]
    assert command.main(given) == 2
    assert "ffd-cpu was made on another machine" in capsys.readouterr().err
    assert not (out / "r.json").exists()


def test_data_go_by_their_folders_name(out: Path) -> None:
    task = {"name": "longbench", "tasks": ["qasper"], "data_dir": "/home/someone/longbench"}
    add(out, "ffd-local", {"name": "ffd"}, [1.0], task=task)
    (row,) = record(out, "ffd-local")["rows"]
    assert row["task"] == task | {"data_dir": "longbench"}


def test_replays_and_calibrations_are_recorded_whole(out: Path) -> None:
    points = [{"label": "ffd delta=5", "method": {"name": "ffd", "delta": 5}, "mass_recall": 0.99, "seconds": 0.3}]
    add(out, "sweep-replay-a", {"name": "sweep"}, [1.0], accuracy=None, task={"name": "replay"}, points=points)
    found = {"calibrate": {"target": "mass_recall", "value": 0.95}, "held_out": {"pairs": {"min": 0.9}}}
    add(out, "ffd-calibrated", {"name": "ffd"}, [1.0], accuracy=None, **found)
    replay, calibration = record(out, "sweep-replay-a", "ffd-calibrated")["rows"]
    assert replay["points"] == points
    assert {key: calibration[key] for key in found} == found


def test_what_each_task_kept_is_counted_over_layers_heads_and_tokens(out: Path) -> None:
    add(out, "ffd-kept", {"name": "ffd"}, [1.0])
    read = {"bytes_read": {"keys": 1}, "dense_bytes": 2}
    layers = [{"union": [10, 20], "context": 100, **read}, {"union": [300, 0], "context": 300, **read}]
    sample = {"index": 0, "prompt_fingerprint": "x", "score": 1.0, "extra": {}}
    rows = [
        {"task": "vt", **sample, "ledger": {"layers": layers, "sliding_context": 100}},
        {"task": "cwe", **sample, "ledger": {"layers": layers[:1], "sliding_context": 0}},
        {"task": "cwe", **sample, "index": 1, "ledger": {"layers": [], "sliding_context": 0}},
    ]
    (out / "runs" / "ffd-kept" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = record(out, "ffd-kept")["rows"]
    assert row["keep_io_by_task"] == pytest.approx({"vt": 265 / 500, "cwe": 0.15})
