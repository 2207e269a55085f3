"""The one command: ``python run.py method=ffd delta=7 task=ruler``; see ``python run.py --help``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf

from experiments.errors import (
    FAILED_EXIT,
    INTERRUPTED_EXIT,
    USAGE_EXIT,
    RunFailedError,
    UsageError,
    hydra_line,
    one_line,
)

# Lets errors reach us instead of Hydra's own multi-line report.
os.environ.setdefault("HYDRA_FULL_ERROR", "1")

_exit_codes: list[int] = []
"""Of the jobs that ran in this process; Hydra returns nothing to its caller."""


@hydra.main(version_base="1.3", config_path=str(Path(__file__).resolve().parent / "conf"), config_name="config")
def job(composed: Any) -> None:
    """One run."""
    from experiments.main import execute
    from experiments.under_sweep import is_job_of_a_sweep

    try:
        code = execute(OmegaConf.to_container(composed, resolve=True), multirun=is_job_of_a_sweep())
    except (UsageError, RunFailedError) as error:
        # Handled here: what leaves a job is reported by Hydra in words of its own.
        print(f"error: {one_line(error)}", file=sys.stderr)
        code = USAGE_EXIT if isinstance(error, UsageError) else FAILED_EXIT
    except KeyboardInterrupt:
        print("interrupted: finished samples are kept, the same command resumes", file=sys.stderr)
        code = INTERRUPTED_EXIT
    except OSError as error:  # what a run stores is guarded where it is written; this is standard output, for one
        print(f"error: {one_line(error)}; what the run has stored is kept", file=sys.stderr)
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (nothing more can be said there, at exit neither)
        code = FAILED_EXIT
    _exit_codes.append(code)


def main() -> int:
    """Run and turn every expected failure into one line and an exit code."""
    from experiments.help import asks_for_help, help_page
    from experiments.sweep import is_sweep, run_sweep
    from experiments.under_sweep import end_with_sweep

    end_with_sweep()
    try:
        if asks_for_help(sys.argv[1:]):
            print(help_page(sys.argv[1:]), flush=True)
            return 0
        if is_sweep(sys.argv[1:]):
            return run_sweep(sys.argv[1:])
        job()
    except UsageError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return USAGE_EXIT
    except BrokenPipeError:  # `run.py --help | head`: who reads has seen enough
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (nothing more can be said there, at exit neither)
        return 0
    except Exception as error:
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        from_hydra = isinstance(error, HydraException | OmegaConfBaseException)
        if not from_hydra and (_exit_codes or not isinstance(error, ValueError | OSError)):
            raise
        print(f"error: {hydra_line(error, sys.argv[1:])}", file=sys.stderr)
        return USAGE_EXIT
    return max(_exit_codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
