"""Layers ready to be timed: filled as in decoding, each held against the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.kernel import timing
from experiments.kernel.gate import Expected, Passed, check, expected
from experiments.kernel.grid import BLOCK, Shape
from experiments.kernel.source import Step
from ffd.methods import LayerGeometry, Method, MethodLayer, RowState

_MOST_SETS = 160


@dataclass(frozen=True, eq=False)
class Filled:
    """Layers that passed the gate, each with its inputs."""

    layers: list[tuple[MethodLayer, Step]]
    passed: Passed
    """Largest errors, and the means of what was kept and read."""
    expected: list[Expected]
    """The reference's, one per distinct step."""

    def run(self, one: Callable[[Any, Step], object], *, hot: bool) -> Callable[[], None]:
        """Call ``one`` for each layer in turn; for the first alone where its data shall stay in the cache."""
        chosen = self.layers[: self.calls(hot=hot)]

        def step() -> None:
            for layer, inputs in chosen:
                one(layer, inputs)

        return step

    def calls(self, *, hot: bool) -> int:
        """Layers that `run` calls."""
        return 1 if hot else len(self.layers)


def fill(method: Method, shape: Shape, inputs: Sequence[Step], *, cold: bool) -> Filled:
    """Fill layers in turn with the inputs and hold each against the reference.

    Parameters
    ----------
    method, shape
        What is timed.
    inputs
        Distinct steps.
    cold
        Fill so many layers that together they read four times the L2 cache.

    Raises
    ------
    GateError
        If a fused step is wrong.
    """
    layers: list[tuple[MethodLayer, Step]] = []
    passed: list[Passed] = []
    references: list[Expected] = []
    sets = len(inputs)
    while len(layers) < sets:
        index = len(layers) % len(inputs)
        layer, step = filled_layer(method, shape, inputs[index]), inputs[index]

        def reference(layer: MethodLayer = layer, step: Step = step, index: int = index) -> Expected:
            if index == len(references):  # layers after the first round hold the same
                references.append(expected(layer, step))
            return references[index]

        passed.append(check(layer, step, reference))
        layers.append((layer, step))
        if cold and len(layers) == len(inputs):
            sets = max(sets, min(_MOST_SETS, max(2, -(-timing.cold_bytes() // int(mean(passed, "bytes_read"))))))
    return Filled(
        layers,
        replace(
            passed[0],
            rel_error=max(p.rel_error for p in passed),
            ledger_error=max(p.ledger_error for p in passed),
            kept=mean(passed, "kept"),
            bytes_read=mean(passed, "bytes_read"),
        ),
        references,
    )


def mean(passed: Sequence[Passed], field: str) -> float:
    """Mean of a field."""
    return float(sum(getattr(p, field) for p in passed)) / len(passed)


def filled_layer(method: Method, shape: Shape, step: Step) -> MethodLayer:
    """A layer that holds the step's keys and values but the last, as it stands when the step begins."""
    s, device = shape, step.q.device
    rows = RowState.allocate(s.B, device)
    # An inner layer of a model, as all but one are: the lengths are older than the previous launch.
    geometry = LayerGeometry(s.B, s.Hq, s.Hkv, s.d, -(-s.T // BLOCK) * BLOCK, s.torch_dtype, device, layer=1)
    layer = method.new_layer(geometry, rows, "fused")
    rows.lengths.fill_(s.T - 1)
    layer.prefill(step.keys[:, :, :-1], step.values[:, :, :-1])
    rows.lengths.fill_(s.T)
    return layer
