"""One job of a sweep: a process of its own, and what became of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from experiments.errors import INTERRUPTED_EXIT, INVALID_EXIT
from experiments.files import read_json
from experiments.gpus import StoppedError, claimed_gpu, visible_gpus
from experiments.under_sweep import PARENT, RUN_ID_FILE

RUN_PY = Path(__file__).resolve().parent.parent / "run.py"


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    status: str
    """complete, partial, invalid, failed, interrupted, skipped, or planned by a dry run."""
    reason: str | None = None
    run_id: str | None = None

    @classmethod
    def read(cls, path: Path) -> Outcome | None:
        """A stored outcome, or None where there is none."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None


INTERRUPTED = Outcome("interrupted", "the same command resumes")


class Running:
    """Processes at work, each in a session of its own, and how an interrupt reaches them."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """A process has started; it is told at once if all are to stop."""
        self._processes.append(process)
        if self.stopping.is_set():
            process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """Let each keep its finished samples and go; no process starts from now on."""
        self.stopping.set()
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)


def run_job(overrides: Sequence[str], root: Path, stem: Path, running: Running | None = None) -> Outcome:
    """Run one job in a process of its own and wait for it.

    Parameters
    ----------
    overrides
        The job's command line.
    root
        Its folder of results.
    stem
        Path without suffix: ``.log`` gets what the job printed, ``.outcome`` what became of it.
    running
        Is told of the process; without it the job runs to its end.
    """
    running = running or Running()
    log, told, stored = (stem.with_suffix(suffix) for suffix in (".log", ".run", ".outcome"))
    for path in (told, stored):
        path.unlink(missing_ok=True)
    try:
        with claimed_gpu(visible_gpus(), running.stopping) as gpu, log.open("w") as output:
            if running.stopping.is_set():
                return INTERRUPTED
            environment = {**os.environ, RUN_ID_FILE: str(told), PARENT: str(os.getpid())}
            if gpu is not None:
                environment["CUDA_VISIBLE_DEVICES"] = gpu
            command = [sys.executable, str(RUN_PY), *overrides]
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            running.add(process)
            code = process.wait()
    except StoppedError:
        return INTERRUPTED
    outcome = _outcome(code, root, told, log)
    stored.write_text(json.dumps(asdict(outcome)))
    told.unlink(missing_ok=True)
    return outcome


def _outcome(code: int, root: Path, told: Path, log: Path) -> Outcome:
    run_id = told.read_text() if told.exists() else None
    summary = None if run_id is None else read_json(root / "runs" / run_id / "summary.json")
    if summary is None:
        run_id = None  # it never began
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code in (0, INVALID_EXIT):
        if any(line.startswith("dry run: ") for line in lines):
            return Outcome("planned", next((line for line in lines if " to run, " in line), lines[-1]))
        # Some runners keep no run: prompts.
        return Outcome(summary["status"], summary["reason"], run_id) if summary else Outcome("complete")
    if code in (INTERRUPTED_EXIT, -signal.SIGINT):  # the latter before the run could say so itself
        return replace(INTERRUPTED, run_id=run_id)
    if code < 0:
        return Outcome("failed", f"killed by {signal.Signals(-code).name}", run_id)
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return Outcome("failed", (named or lines or [f"exit code {code}"])[-1], run_id)
