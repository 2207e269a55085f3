"""What a run's process does when a sweep started it; nothing otherwise."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

RUN_ID_FILE = "FFD_JOB_RUN_ID_FILE"
"""Environment variable: file to which the process writes the id of its run."""
PARENT = "FFD_JOB_PARENT"
"""Environment variable: process id of the sweep or of the launcher's worker."""
_PR_SET_PDEATHSIG = 1


def is_job_of_a_sweep() -> bool:
    """Whether a sweep started this process."""
    return RUN_ID_FILE in os.environ


def announce_run(run_id: str) -> None:
    """Tell the sweep which run this is."""
    path = os.environ.get(RUN_ID_FILE)
    if path:
        Path(path).write_text(run_id)


def end_with_sweep() -> None:
    """Let this process die with the sweep: a killed sweep must leave no writer behind."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)
