"""The kept fraction as an input: margins per kv head, found by counting what steps really load.

Random keys have no hot blocks, and a published margin keeps all of them. One margin for all heads (the
first version of this runner) had two faults: heads differ, and the pseudo-maximum rises with the number
of generated tokens, whose keys are longer than the random ones, so that what was calibrated at 18 %
timed 13 %. Here every kv head of every layer has its own margin, and the timed steps are the calibrated
ones (`experiments.throughput.steps`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.throughput.steps import Steps
from ffd.methods import MethodLayer

WIDEST = 256.0
"""Nats on either side of zero in which a margin is looked for: none kept, and all."""
_ROUNDS = ((WIDEST, 11), (0.5, 10))
"""Half widths of the bracket and bisections in it. A layer's queries depend on what the layers below kept: the second
bracket is opened around the first one's result, when those hardly move any more."""
_OFFSETS = (1.0, 16)
"""Half width of the bracket, and bisections in it, of an offset to all margins: with a model whose layers depend much
on what those below them keep, the mean misses the target until all are moved together."""
_CLOSE = 0.002
"""An error of the mean this small ends them."""


def set_kept(steps: Steps, kept: float) -> None:
    """Set the margins of all layers that have some, so that a window of steps keeps a fraction of the tokens.

    A head keeps whole blocks, so that it meets the target to half a block; which side of it a head takes is
    chosen so that the mean over heads meets the target.

    Parameters
    ----------
    steps
        Filled. Its method has margins per head (``delta_nats``, a float32 tensor [Hq] that decode steps read).
    kept
        Fraction of the visible tokens, union over a kv head's query heads, mean over kv heads.
    """
    layers = [handle.storage for handle in steps.cache.method_layers]
    shape = (len(layers), layers[0].geometry.num_kv_heads)
    low, high = torch.full(shape, -WIDEST), torch.full(shape, WIDEST)
    low_kept, high_kept = (_measure(steps, layers, margins) for margins in (low, high))
    for half_width, bisections in _ROUNDS:
        if half_width < WIDEST:
            centre = (low + high) / 2
            low, high = centre - half_width, centre + half_width
            low_kept, high_kept = (_measure(steps, layers, margins) for margins in (low, high))
        for _ in range(bisections):
            middle = (low + high) / 2
            found = _measure(steps, layers, middle)
            below = found < kept
            low, low_kept = torch.where(below, middle, low), torch.where(below, found, low_kept)
            high, high_kept = torch.where(below, high, middle), torch.where(below, high_kept, found)
    upper = _sides(low_kept.flatten(), high_kept.flatten(), kept).view(shape)
    margins, offset, width, errors = torch.where(upper, high, low), 0.0, _OFFSETS[0], []
    for _ in range(_OFFSETS[1]):
        error = float(_measure(steps, layers, margins + offset).mean()) - kept
        errors.append((abs(error), offset))
        if abs(error) < _CLOSE:
            return
        width /= 2
        offset += -width if error > 0 else width
    _measure(steps, layers, margins + min(errors)[1])


def _sides(low: Tensor, high: Tensor, target: float) -> Tensor:
    """Whether each head takes its upper kept fraction, so that the running mean stays at the target."""
    chosen, error = [], 0.0
    for below, above in zip(low.tolist(), high.tolist(), strict=True):
        chosen.append(abs(error + above - target) < abs(error + below - target))
        error += (above if chosen[-1] else below) - target
    return torch.tensor(chosen)


def _measure(steps: Steps, layers: list[MethodLayer], margins: Tensor) -> Tensor:
    """Kept fraction of each layer and kv head [L, Hkv] over one window with these margins [L, Hkv]."""
    for layer, own in zip(layers, margins, strict=True):
        layer.delta_nats.copy_(own.repeat_interleave(layer.geometry.group_size))  # type: ignore[attr-defined]
    steps.clear()
    steps.window()
    counts = [layer.ledger.counts() for layer in layers]
    return torch.stack([c.union.sum(dim=0) / c.context.sum(dim=0) for c in counts]).float()
