"""The launches of FFD's fused step, each with what it does: the per-stage breakdown, in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from experiments.kernel.gate import Passed
from experiments.kernel.grid import Shape
from experiments.kernel.rows import DENSE_RULE
from experiments.kernel.source import Step
from ffd.methods import Method, MethodLayer
from ffd.methods.dense import Dense
from ffd.methods.ffd import FFD

if TYPE_CHECKING:
    from ffd.kernels.ffd_scratch import FFDScratch

Launch = Callable[[Any, Step], object]


@dataclass(frozen=True)
class Stage:
    """One launch."""

    names: str
    """What it does, of the parts that `whole_step` names."""
    launch: Launch
    kept_bytes: float
    """Bytes per kept token and channel that it must read: `floor_bytes`, divided over the launches."""
    all_bytes: float
    """Bytes per token and channel."""

    def bytes(self, shape: Shape, kept: float) -> float:
        """What the launch must read."""
        return shape.B * shape.T * shape.Hkv * shape.d * (self.all_bytes + kept * self.kept_bytes)


def _scratch(layer: Any) -> FFDScratch:
    from ffd.kernels.ffd_scratch import FFDScratch
    from ffd.kernels.launch import scratch_of

    return scratch_of(layer.ledger, lambda: FFDScratch.allocate(layer))


def _scan(layer: Any, step: Step) -> None:
    from ffd.kernels.ffd_scan import ffd_scan

    token = step.keys[:, :, -1:], step.values[:, :, -1:]
    ffd_scan(layer, step.q, step.scale, _scratch(layer), token)


def _keep(layer: Any, step: Step) -> None:
    from ffd.kernels.ffd_keep import ffd_keep

    scratch = _scratch(layer)
    ffd_keep(layer, scratch, scratch.kept)


def _attend(layer: Any, step: Step) -> None:
    from ffd.kernels.ffd_attend import ffd_attend

    scratch = _scratch(layer)
    ffd_attend(layer, step.q, step.scale, scratch, scratch.kept)


def _reduce(layer: Any, step: Step) -> None:
    from ffd.kernels.ffd_reduce import ffd_reduce

    ffd_reduce(_scratch(layer), torch.empty_like(step.q))


_LIST = Stage("list", _keep, kept_bytes=0.0, all_bytes=0.0)
_FFD = (
    Stage("append threshold scan", _scan, kept_bytes=0.0, all_bytes=34 / 128),
    Stage("tail attend", _attend, kept_bytes=3.0, all_bytes=0.0),
    Stage("reduce", _reduce, kept_bytes=0.0, all_bytes=0.0),
)


def stages(method: Method, shape: Shape) -> tuple[Stage, ...]:
    """Launches of a method's fused step that can be timed alone."""
    if not isinstance(method, FFD):
        return ()
    from ffd.kernels.ffd_scratch import shares_tiles

    scan, *rest = _FFD
    return (scan, _LIST, *rest) if shares_tiles(method, shape.B * shape.Hkv, shape.T) else _FFD


def whole_step(method: Method, shape: Shape) -> str:
    """What one decode step contains."""
    if isinstance(method, FFD):
        quantise = " quantise" if shape.T % method.block_size == 0 else ""
        return f"append{quantise} tail threshold scan attend reduce"
    return "append attend reduce" if method.reads_everything else "append select attend reduce"


def floor_bytes(method: Method, layer: MethodLayer, shape: Shape, passed: Passed) -> tuple[float, str]:
    """Bytes that the step must read, and by which rule.

    FFD has one fixed floor whatever its kernel and storage read: 2-bit codes and 16-bit scales of all tokens, 8-bit
    residual and 16-bit values of kept ones. Dense must read every key and value. For the others it is what their own
    published storage makes a step read, counted by the ledger.
    """
    if isinstance(method, FFD):
        return sum(stage.bytes(shape, passed.kept) for stage in _FFD), "34 bytes a token, 384 a kept one, at d=128"
    if isinstance(method, Dense):
        return passed.bytes_read, DENSE_RULE
    return passed.bytes_read, f"its own storage: {', '.join(layer.bytes_read(layer.ledger.counts()))}"
