"""What a killed process leaves half written is gone when its run goes on."""

from __future__ import annotations

import json

from experiments.fidelity_log import FidelityLog
from experiments.files import clear_leftovers
from tests.fidelity_runs import common, the_run, tiny_folder
from tests.run_in_process import invoke

__all__ = ["tiny_folder"]


def test_a_resumed_run_removes_half_written_files(tiny_folder, tmp_path, monkeypatch):
    """Once their names, which end in the killed process's id, kept them for good: a trace of 32K takes gigabytes."""
    arguments = ["runner=fidelity", "trace=record", *common(tiny_folder, tmp_path, samples=1)]
    assert invoke(arguments, monkeypatch) == 0
    folder = the_run(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "status": "partial"}))
    left = [
        folder / ".summary.json.12.tmp",
        folder / "traces" / ".niah_single_1-1.safetensors.12.partial",
        folder / "figures" / ".spearman_by_layer.csv.12.partial",
    ]
    for path in left:
        path.touch()
    assert invoke(arguments, monkeypatch) == 0
    assert not any(path.exists() for path in left)


def test_only_half_written_files_are_leftovers(tmp_path):
    kept = [tmp_path / name for name in (".lock", ".reserve", "a.12.tmp", ".a.tmp", ".a.12.partial.json")]
    for path in (*kept, tmp_path / ".a.json.12.tmp"):
        path.touch()
    clear_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_finished_run_gives_its_ballast_back(tiny_folder, tmp_path, monkeypatch):
    """Once a kill between the summary and the end left it for good."""
    arguments = ["runner=fidelity", *common(tiny_folder, tmp_path, samples=1)]
    assert invoke(arguments, monkeypatch) == 0
    ballast = the_run(tmp_path) / ".reserve"
    ballast.touch()
    assert invoke(arguments, monkeypatch) == 0
    assert not ballast.exists()


def test_a_sum_that_a_kill_left_behind_its_successor_is_removed(tiny_folder, tmp_path, monkeypatch):
    """Once a kill between the pointer and the removal left the earlier sum for good."""
    assert invoke(["runner=fidelity", *common(tiny_folder, tmp_path, samples=2)], monkeypatch) == 0
    folder = the_run(tmp_path) / "fidelity"
    earlier = folder / "sum-of-1.safetensors"
    earlier.touch()
    log = FidelityLog(folder, 16)
    log.start()
    log.keep("niah_single_1", 1)
    assert not earlier.exists()
    assert (folder / "sum-of-2.safetensors").exists()
