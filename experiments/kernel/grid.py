"""What is timed: shapes, ways of timing, and methods at kept fractions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ffd.methods import Method, create, method_class

BLOCK = 128
"""Tokens of a planted hot block: FFD's default block."""
LENGTHS = (4096, 16384, 32768, 65536, 131072, 262144)
OFF_BLOCK = 64
"""Tokens taken off a length so that it is no multiple of the block, as 127 of 128 steps are."""
WITH_TAIL = tuple(length - OFF_BLOCK for length in LENGTHS)
COMPLETING = (16384, 65536, 262144)
"""Lengths whose step also quantises the block that it completes."""
KEPT = (0.02, 0.05, 0.18, 0.27, 1.0)


@dataclass(frozen=True)
class Shape:
    """One decode step of one layer."""

    B: int
    T: int
    """Tokens in the cache, the current one included."""
    Hq: int = 32
    Hkv: int = 8
    d: int = 128
    dtype: str = "bfloat16"
    trace: str = ""
    """Where keys were captured; nothing where they are planted."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of queries and values."""
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[self.dtype]

    @property
    def label(self) -> str:
        """Every field, to read."""
        fields = f"B={self.B} T={self.T} Hq={self.Hq} Hkv={self.Hkv} d={self.d} {self.dtype}"
        return f"{fields} {self.trace}" if self.trace else fields


@dataclass(frozen=True)
class Mode:
    """How a step is timed."""

    timing: str = "graph"
    """graph, eager, or interpreted (Triton's interpreter on a CPU: the time means nothing)."""
    l2: str = "cold"
    """cold or hot."""


@dataclass(frozen=True)
class Entry:
    """One method at one kept fraction."""

    method: Method
    kept: float | None
    """Target; None where captured keys decide."""

    @property
    def label(self) -> str:
        """Name and target."""
        return self.method.label if self.kept is None else f"{self.method.label} kept={self.kept:g}"


@dataclass(frozen=True)
class Point:
    """One shape with all that is timed on it; dense baselines always are."""

    shape: Shape
    modes: tuple[Mode, ...]
    entries: tuple[Entry, ...]
    stages: bool = True
    """Also time each launch of a fused step alone, in the first mode."""


def entries(name: str, knobs: Mapping[str, Any], shape: Shape, kept: Sequence[float | None]) -> Iterator[Entry]:
    """The method at every kept fraction that the shape can have.

    A method whose knob is a number of tokens gets that budget; the kept fraction of the others comes from the
    planted keys, or without a target (None) from the captured ones. What reads everything, whatever the keys, has
    one entry at 1. Below two blocks' worth of tokens a target cannot be met. Raises `ffd.methods.KnobError`.
    """
    cls = method_class(name)
    if cls.reads_everything:
        yield Entry(create(name, knobs), 1.0)
        return
    knob = create(name, knobs).cost_knob
    for fraction in kept:
        if fraction is None:
            yield Entry(create(name, knobs), None)
            continue
        if fraction * shape.T < 2 * BLOCK:
            continue
        chosen = dict(knobs)
        if knob is not None and knob.high == math.inf:
            tokens = shape.T + BLOCK if fraction == 1.0 else int(fraction * shape.T)  # whole pages, the last one too
            chosen[knob.name] = max(tokens, int(knob.low))
            chosen |= {knob: None for knob in ("keep_fraction",) if knob in chosen}  # else it would overrule the budget
        yield Entry(create(name, chosen), fraction)


def point(
    shape: Shape,
    methods: Mapping[str, Mapping[str, Any]],
    kept: Sequence[float | None],
    modes: Sequence[Mode] = (Mode(),),
    stages: bool = True,
) -> Point:
    """A shape with methods, given as name and knobs, at kept fractions; dense is timed anyway."""
    chosen = (e for name, knobs in methods.items() if name != "dense" for e in entries(name, knobs, shape, kept))
    return Point(shape, tuple(modes), tuple(chosen), stages)


ALL_MODES = (Mode(), Mode("eager", "cold"), Mode("graph", "hot"))
FFD_KNOBS: dict[str, dict[str, Any]] = {"ffd": {"delta": 5.0}}
OTHERS: dict[str, dict[str, Any]] = {
    name: {} for name in ("quest", "twilight", "kivi", "topk", "topp", "topdelta", "sink_threshold", "streaming")
}
PARTS = ("lengths", "batch", "methods", "components", "geometry")
COMPONENT_KEPT = 0.273
"""Kept share of the paper's ablation of the selection rule."""


def components(shape: Shape) -> Point:
    """The ablation's grid and the exact rules per token and head, all keeping the same share; FFD is its fused point.

    The planted blocks carry all the mass, so that nearly all of it keeps what the margin keeps.
    """
    from ffd.methods.component import BITS, COST_KNOBS, PATHS

    mass: dict[str, Any] = {"p": 0.999}
    bits = sorted(BITS, key=(2, 16).__contains__, reverse=True)  # the paper's first, should time run out
    grid = [("component", {"bits": b, "select": s, "path": p, **mass}) for b in bits for s in COST_KNOBS for p in PATHS]
    grid += [("topk", {}), ("topp", mass), ("topdelta", {})]
    chosen = tuple(e for name, knobs in grid for e in entries(name, knobs, shape, (COMPONENT_KEPT,)))
    return Point(shape, (Mode(),), chosen, stages=False)


def standard(part: str) -> list[Point]:
    """A part of the committed record's grid: FFD over lengths, at B = 8, beside other methods, in other geometries."""
    if part == "lengths":
        plain = [point(Shape(1, T), FFD_KNOBS, KEPT) for T in WITH_TAIL + COMPLETING]
        return sorted(plain, key=lambda p: p.shape.T)
    if part == "batch":
        return [point(Shape(8, T - OFF_BLOCK), FFD_KNOBS, (0.02, 0.18, 1.0), stages=False) for T in LENGTHS[:4]]
    if part == "methods":
        timed = [(16384 - OFF_BLOCK, ALL_MODES), (65536 - OFF_BLOCK, ALL_MODES)]
        chosen = {**FFD_KNOBS, **OTHERS}
        return [point(Shape(1, T), chosen, (0.18,), modes, stages=False) for T, modes in timed]
    if part == "components":
        return [components(Shape(1, T - OFF_BLOCK)) for T in (16384, 65536)]
    geometries = [(1, 128, "bfloat16"), (7, 128, "bfloat16"), (8, 128, "bfloat16"), (4, 64, "bfloat16"),
                  (7, 64, "bfloat16"), (4, 128, "float16")]  # fmt: skip
    return [
        point(Shape(1, 16384 - OFF_BLOCK, 8 * G, 8, d, dtype), FFD_KNOBS, (0.18,), stages=False)
        for G, d, dtype in geometries
    ]
