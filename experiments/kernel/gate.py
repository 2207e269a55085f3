"""Correct before fast: layers are compared with the fp32 reference before they are timed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.kernel.source import Step
from ffd.ledger import Counts
from ffd.methods import MethodLayer

MOST_OUTPUT_ERROR = 0.03
"""``||out - reference|| / ||reference||`` in 16 bits, where a budget may take another of two equal tokens; every row
says how far it is off, and FFD and dense stay below 0.005.
"""
MOST_LEDGER_ERROR = 0.01
"""Share of a counted total: a score that rounds to the other side of a threshold in 16 bits is no error."""


class GateError(Exception):
    """The fused step is wrong."""


@dataclass(frozen=True, eq=False)
class Expected:
    """What the reference executor makes of a step."""

    out: Tensor
    """[B, Hq, d]."""
    counts: Counts


@dataclass(frozen=True)
class Passed:
    """How near a fused step came."""

    rel_error: float
    ledger_error: float
    """Largest difference of a ledger column from its recount, as a share of the recount."""
    kept: float
    """Tokens loaded of those visible: union per kv head, mean over kv heads."""
    bytes_read: float
    """What the method's own storage made it read."""
    sparse_steps: float
    """Steps that the ledger counted for the one that was made."""


@contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialised memory holds NaN, so that what a kernel forgets to write is found."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills `torch.empty`
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def run(layer: MethodLayer, step: Step) -> Tensor:
    """The whole step: store the current token, attend."""
    return layer.step(step.keys[:, :, -1:], step.values[:, :, -1:], step.q, step.scale)


def fused(layer: MethodLayer, step: Step) -> tuple[Tensor, Counts]:
    """Output and counts of one fused step, the one that will be timed."""
    layer.ledger.reset()
    with poisoned():
        out = run(layer, step)
    counts = layer.ledger.counts()
    layer.ledger.reset()
    return out, counts


def expected(layer: MethodLayer, step: Step) -> Expected:
    """The reference's output over the layer's storage, and its recount."""
    layer.ledger.reset()
    out, _ = layer.decode_reference(step.q, step.scale)
    counts = layer.ledger.counts()
    layer.ledger.reset()
    return Expected(out, counts)


def relative_error(out: Tensor, want: Tensor) -> float:
    """``||out - want|| / ||want||``; raises `GateError` beyond `MOST_OUTPUT_ERROR`, NaN included."""
    error = float((out.float() - want.float()).norm() / want.float().norm())
    if not error < MOST_OUTPUT_ERROR:
        raise GateError(f"output differs from the reference by {error:.4g}")
    return error


def check(layer: MethodLayer, step: Step, reference: Callable[[], Expected]) -> Passed:
    """Hold one fused step against the reference.

    Parameters
    ----------
    layer
        Filled up to the current token, which its length counts already.
    step
        The layer's inputs.
    reference
        Called after the fused step, which stores the token.

    Raises
    ------
    GateError
        If output or ledger are wrong.
    """
    out, counts = fused(layer, step)
    want = reference()
    error = relative_error(out, want.out)
    wrong = 0.0
    for name, value in vars(want.counts).items():
        difference = ((getattr(counts, name) - value).abs().sum() / value.sum().clamp(min=1)).item()
        wrong = max(wrong, difference)
        if difference > (0.0 if name in ("steps", "context") else MOST_LEDGER_ERROR):
            raise GateError(f"ledger column {name} differs from its recount by {difference:.4g} of it")
    return Passed(
        rel_error=error,
        ledger_error=wrong,
        kept=float((counts.union / counts.context).mean()),
        bytes_read=float(sum(part.sum() for part in layer.bytes_read(counts).values())),
        sparse_steps=float(counts.steps.mean()),
    )
