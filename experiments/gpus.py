"""One GPU for each job of this machine: claimed by a file lock, so that any launcher may start the jobs."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def visible_gpus() -> list[str]:
    """Ids of the GPUs this process may use, without loading CUDA."""
    restricted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if restricted is not None:
        return [name for name in restricted.split(",") if name.strip()]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(i) for i, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]


class StoppedError(Exception):
    """The wait for a GPU was ended."""


@contextmanager
def claimed_gpu(
    gpus: list[str], stopping: threading.Event | None = None, poll_seconds: float = 0.2
) -> Iterator[str | None]:
    """Hold one of ``gpus`` alone, waiting while all are taken; None where there is none.

    Raises
    ------
    StoppedError
        If ``stopping`` is set while it waits.
    """
    if not gpus:
        yield None
        return
    folder = Path(tempfile.gettempdir()) / f"ffd-gpus-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    while True:
        for gpu in gpus:
            lock = (folder / gpu.replace("/", "_")).open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            try:
                yield gpu
            finally:
                lock.close()
            return
        if stopping is not None and stopping.is_set():
            raise StoppedError
        time.sleep(poll_seconds)
