"""Start the jobs of a sweep: by default here, or by one of Hydra's launchers (docs/launchers/)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from experiments.errors import UsageError, hydra_line, one_line
from experiments.gpus import visible_gpus
from experiments.job import Outcome, Running, run_job
from experiments.jobs import Job

Report = Callable[[int, Outcome], None]
"""Called with a job's position as soon as its outcome is known."""


def launch_here(jobs: Sequence[Job], root: Path, stems: Sequence[Path], report: Report) -> None:
    """Run each job in a process of its own: one at a time per GPU, or one at a time."""
    running = Running()
    pool = ThreadPoolExecutor(max(1, len(visible_gpus())))
    waiting = {
        pool.submit(run_job, job.overrides, root, stem, running): position
        for position, (job, stem) in enumerate(zip(jobs, stems, strict=True))
    }
    try:
        for done in as_completed(list(waiting)):
            report(waiting.pop(done), done.result())
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        running.stop()
        for late, position in waiting.items():
            if not late.cancelled():
                report(position, late.result())
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def launch_by_hydra(
    jobs: Sequence[Job], root: Path, stems: Sequence[Path], report: Report, overrides: Sequence[str]
) -> None:
    """Hand the jobs to the Hydra launcher that ``overrides`` name; its workers start our job processes.

    Must be called inside Hydra's ``initialize_config_dir``.

    Raises
    ------
    UsageError
        If the launcher is not installed or its keys are not accepted.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException
    from hydra.types import HydraContext, RunMode
    from omegaconf.errors import OmegaConfBaseException

    hydra = GlobalHydra.instance().hydra
    folder = stems[0].parent.resolve()
    try:
        config = hydra.compose_config("config", [*overrides, f"hydra.sweep.dir={folder}"], run_mode=RunMode.MULTIRUN)
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=HydraContext(hydra.config_loader, _callbacks(config)),
            task_function=LauncherTask(root.resolve(), tuple(stem.resolve() for stem in stems)),
            config=config,
        )
    except (HydraException, OmegaConfBaseException, ImportError) as error:
        raise UsageError(hydra_line(error, overrides)) from None
    try:
        launcher.launch([list(job.overrides) for job in jobs], initial_job_idx=0)
    except Exception as error:  # a worker that died must not take the others' outcomes with it
        print(f"launcher: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
    for position, stem in enumerate(stems):
        outcome = Outcome.read(stem.with_suffix(".outcome"))
        report(position, outcome or Outcome("failed", "no result came back from the launcher's worker"))


class LauncherTask:
    """What a launcher's worker runs for a job: the process that `run_job` starts, nothing in the worker itself.

    Parameters
    ----------
    root, stems
        As `run_job` takes them, by job number.
    """

    def __init__(self, root: Path, stems: tuple[Path, ...]) -> None:
        self.root, self.stems = root, stems

    def __call__(self, config: Any) -> None:
        """Run the job whose configuration Hydra composed for this worker."""
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        run_job(list(hydra.overrides.task), self.root, self.stems[hydra.job.num])


def _callbacks(config: Any) -> Any:
    from hydra._internal.callbacks import Callbacks  # a launcher needs one; Hydra has no public way to make it

    return Callbacks(config)
