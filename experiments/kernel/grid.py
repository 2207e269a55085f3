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


def whole_blocks(tokens: int) -> tuple[int, int]:
    """Blocks that can be hot, and tokens of the tail: what follows them, the current token at least."""
    blocks = (tokens - 1) // BLOCK
    return blocks, tokens - blocks * BLOCK


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
    for fraction in kept:
        if fraction is None:
            yield Entry(create(name, knobs), None)
        elif fraction * shape.T >= 2 * BLOCK:
            yield Entry(create(name, {**knobs, **_budgets(create(name, knobs), fraction, shape.T)}), fraction)


def _budgets(method: Method, fraction: float, tokens: int) -> dict[str, Any]:
    """Knobs that are numbers of tokens, for a kept fraction."""
    knob, known = method.cost_knob, method.knobs()
    share = int(fraction * tokens)
    if fraction == 1.0:
        share = tokens + BLOCK  # whole pages, the last one too
    elif knob is None or knob.name != "window":
        # Heads have this many hot tokens or a block more. A budget beyond a head's hot tokens would go to cold ones,
        # other ones for every query head, so that their union grew past the target.
        _, tail = whole_blocks(tokens)
        share = tail + (share - tail) // BLOCK * BLOCK
    if knob is not None and knob.high == math.inf:
        budget: dict[str, Any] = {knob.name: max(share, int(knob.low))}
        return (
            {**budget, "keep_fraction": None} if known.get("keep_fraction") else budget
        )  # it would overrule the budget
    # What prunes a base selection needs one that has room for the target.
    return {"token_budget": max(known["token_budget"], share + BLOCK)} if "base" in known else {}


def point(
    shape: Shape,
    methods: Mapping[str, Mapping[str, Any]],
    kept: Sequence[float | None],
    modes: Sequence[Mode] = (Mode(),),
    stages: bool = True,
) -> Point:
    """A shape with methods, given as name and knobs, at kept fractions; dense is timed anyway.

    One kept fraction after the other, so that its keys are planted once for all methods.
    """
    chosen = [e for name, knobs in methods.items() if name != "dense" for e in entries(name, knobs, shape, kept)]
    return Point(shape, tuple(modes), tuple(sorted(chosen, key=lambda e: e.kept or 0.0)), stages)
