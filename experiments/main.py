"""From a composed configuration to the runner it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.config import run_config


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
    if config.runner == "prompts":
        from experiments.prompts import run_prompts

        return run_prompts(config)
    from experiments.accuracy import run_accuracy

    return run_accuracy(config)
