"""From a composed configuration to the runner it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.config import RunConfig, run_config
from experiments.errors import UsageError
from experiments.unfetched import unfetched


def execute(composed: Mapping[str, Any], *, multirun: bool) -> int:
    """Run one job; returns its exit code.

    Parameters
    ----------
    composed
        Hydra's configuration as plain containers.
    multirun
        Whether it is one job of a sweep.
    """
    config = run_config(composed, multirun=multirun)
    if config.dry_run and (line := unfetched(config)) is not None:
        from experiments.progress import console

        console.print(line)
        return 0
    if config.runner == "kernel":
        from experiments.kernel.runner import run_kernel

        return run_kernel(config)
    _refuse_match(config)
    if config.task["name"] == "lm_eval":
        from experiments.lm_eval import run_lm_eval

        return run_lm_eval(config)
    if config.runner == "prompts":
        from experiments.prompts import run_prompts

        return run_prompts(config)
    if config.replays:
        from experiments.replay import run_replay

        return run_replay(config)
    if config.runner == "calibrate":
        from experiments.calibrate import run_calibrate

        return run_calibrate(config)
    if config.runner == "throughput":
        from experiments.throughput.run import run_throughput

        return run_throughput(config)
    if config.match.target is not None:
        from experiments.match import matched

        config = matched(config)
    if config.runner == "fidelity":
        from experiments.fidelity import run_fidelity

        return run_fidelity(config)
    from experiments.accuracy import run_accuracy

    return run_accuracy(config)


def _refuse_match(config: RunConfig) -> None:
    """Refuse a target where no single method runs on samples."""
    target, runner = config.match.target, config.runner
    if target is None:
        return
    if runner not in ("accuracy", "fidelity"):
        raise UsageError(f"match.{target}={config.match.value}: expected null with runner={runner}")
    if config.replays:
        raise UsageError(f"match.{target}={config.match.value}: expected null with trace=replay")
