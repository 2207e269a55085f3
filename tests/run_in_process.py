"""Call `run.py` in the tests' own process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import run


def invoke(arguments: list[str], monkeypatch: Any) -> int:
    """Run in this process; returns the exit code."""
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    monkeypatch.setattr(run, "_exit_codes", [])
    return run.main()


def only_run(tmp_path: Path) -> Path:
    """Folder of the one run under ``out``."""
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    return folder
