"""Which files of a folder are traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.errors import UsageError
from experiments.replay import trace_paths


def test_a_runs_own_folder_gives_its_traces_and_not_its_sums(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "ffd-ruler-1"
    for name in ("traces/vt-0", "traces/cwe-0", "fidelity/sum-of-2"):
        path = run / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    expected = [run / "traces" / f"{name}.safetensors" for name in ("cwe-0", "vt-0")]
    for folder in (run / "traces", run, tmp_path):
        assert trace_paths(folder) == expected
    assert trace_paths(expected[0]) == expected[:1]


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match=f"fidelity.traces={path}: expected a trace file"):
            trace_paths(path)
