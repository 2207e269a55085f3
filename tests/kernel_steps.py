"""What the tests of the kernel runner share: a shape, a layer without kernels, a measured row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from unittest import mock

from experiments.kernel.gate import Passed
from experiments.kernel.grid import Shape
from experiments.kernel.layers import filled_layer
from experiments.kernel.rows import Row
from experiments.kernel.source import Step
from ffd.methods import Method, create

TINY = Shape(1, 2000, 4, 2, 32, "float16")
"""Small enough for a CPU."""


def ticking() -> Callable[..., float]:
    """A clock for `timing.duration`: every timing takes one us more than the one before; the steps run once."""
    times = count(1)

    def duration(step: Callable[[], object], calls: int, mode: str) -> float:
        step()
        return float(next(times))

    return duration


def row(**changes: object) -> Row:
    """A measured row of FFD."""
    base = Row(
        method="ffd", knobs={}, storage="int8 block 128", B=1, T=4032, Hq=32, Hkv=8, d=128, dtype="bfloat16", trace="",
        kept_target=0.18, kept=0.18, source="planted", timing="graph", l2="cold",
        step=["append", "tail", "threshold", "scan", "attend", "reduce"], time_us=10.0, bytes=1e6, bytes_rule="",
        floor_us=1.0, efficiency=0.1, sdpa_flash_us=20.0, best_dense_us=15.0, rel_error=0.002, ledger_error=0.0,
        sparse_steps=1.0,
    )  # fmt: skip
    return replace(base, **changes)


def reference_layer(name: str, shape: Shape, step: Step, method: Method | None = None):
    """Filled as the runner does, for the executor that needs no kernel."""
    method = method or create(name)
    make = type(method).new_layer
    with mock.patch.object(type(method), "new_layer", lambda m, g, r, _: make(m, g, r, "reference")):
        return filled_layer(method, shape, step), step


def passed_with(kept: float) -> Passed:
    """What the gate says of a step that kept this share."""
    return Passed(0.0, 0.0, kept, 0.0, 1.0)
