"""``fuse=true`` in a grid: whether every case that demands it can have it, asked before the first case is timed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from experiments.throughput.bench import Bench
from experiments.throughput.cases import Case
from ffd.fusion import resolve_fusion, why_not_fusable
from ffd.support import SettingError


def require_fusable(cases: Iterable[Case], device: str, dtype: str) -> None:
    """Refuse what no model could have, before one is loaded.

    Parameters
    ----------
    cases
        All that will be timed.
    device
        cuda or cpu.
    dtype
        Of the model's weights: float32, bfloat16 or float16.

    Raises
    ------
    ffd.support.SettingError
        With the reason.
    """
    for rows in _demanded(cases):
        reason = why_not_fusable(torch.device(device), getattr(torch, dtype), rows)
        if reason is not None:
            raise SettingError("fuse", reason)


def require_fused(cases: Iterable[Case], bench: Bench) -> None:
    """Refuse what this model cannot have; raises `ffd.support.SettingError`."""
    for rows in _demanded(cases):
        resolve_fusion(True, bench.model, rows)
    bench.release()  # nothing of it is in the memory of the first case


def _demanded(cases: Iterable[Case]) -> list[int]:
    """Batch sizes for which fused kernels are demanded."""
    return sorted({case.B for case in cases if case.fuse == "true"})
