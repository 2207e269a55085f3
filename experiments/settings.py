"""Settings of the engine that this machine cannot have: refused before a model is loaded, in a dry run too."""

from __future__ import annotations

import torch

from experiments.config import RunConfig
from ffd.executor import resolve_executor
from ffd.fusion import without_gpu
from ffd.graph import without_graphs
from ffd.support import SettingError


def executor_here(config: RunConfig) -> str:
    """Executor of a run on this machine, fused or reference.

    Raises
    ------
    ffd.executor.ExecutorError
        For ``executor=fused`` where kernels cannot run.
    ffd.support.SettingError
        For ``engine.graph=true`` or ``engine.fuse=true`` without a GPU.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for setting, value, obstacle in (
        ("graph", config.graph, without_graphs(device)),
        ("fuse", config.fuse, without_gpu(device)),
    ):
        if value is True and obstacle is not None:
            raise SettingError(setting, obstacle)
    return resolve_executor(config.executor, device)
