"""The committed record's grid, in parts that may run on GPUs of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.kernel.grid import COMPLETING, KEPT, LENGTHS, OFF_BLOCK, WITH_TAIL, Mode, Point, Shape, entries, point
from ffd.methods import method_names

PARTS = ("lengths", "batch", "methods", "conditions", "components", "geometry")
ALL_MODES = (Mode(), Mode("eager", "cold"), Mode("graph", "hot"))
OTHER_MODES = ALL_MODES[1:]
"""Without the first, which other parts have: no point is timed in two parts, but for dense attention."""
FFD_KNOBS: dict[str, dict[str, Any]] = {"ffd": {"delta": 5.0}}
COMPONENT_KEPT = 0.273
"""Kept share of the paper's ablation of the selection rule."""
MAIN_LENGTHS = (16384 - OFF_BLOCK, 65536 - OFF_BLOCK)
"""Where more is timed than elsewhere: every point of the ablation, a batch of 8, every way of timing."""


def others() -> dict[str, dict[str, Any]]:
    """Every registered method with its own knobs, but FFD, dense and the ablation, which have parts of their own."""
    return {name: {} for name in method_names() if name not in ("dense", "ffd", "component")}


def standard(part: str) -> list[Point]:
    """One of `PARTS`.

    FFD over lengths and at B = 8; the other methods over the same lengths and kept fractions, and under other
    conditions; points of the ablation; FFD in other geometries.
    """
    if part == "lengths":
        plain = [point(Shape(1, T), FFD_KNOBS, KEPT) for T in WITH_TAIL + COMPLETING]
        return sorted(plain, key=lambda p: p.shape.T)
    if part == "batch":
        return [point(Shape(8, T - OFF_BLOCK), FFD_KNOBS, (0.02, 0.18, 1.0), stages=False) for T in LENGTHS[:4]]
    if part == "methods":
        return [point(Shape(1, T), others(), KEPT, stages=False) for T in WITH_TAIL]
    if part == "conditions":
        return list(_conditions())
    if part == "components":
        elsewhere = (T for T in WITH_TAIL if T not in MAIN_LENGTHS)
        return [_components(Shape(1, T)) for T in (*MAIN_LENGTHS, *elsewhere)]
    geometries = [(1, 128, "bfloat16"), (7, 128, "bfloat16"), (8, 128, "bfloat16"), (4, 64, "bfloat16"),
                  (7, 64, "bfloat16"), (4, 128, "float16")]  # fmt: skip
    return [
        point(Shape(1, 16384 - OFF_BLOCK, 8 * G, 8, d, dtype), FFD_KNOBS, (0.18,), stages=False)
        for G, d, dtype in geometries
    ]


def quick() -> list[Point]:
    """Three lengths and kept fractions."""
    return [point(Shape(1, length - OFF_BLOCK), FFD_KNOBS, (0.02, 0.18, 1.0)) for length in (16384, 65536, 262144)]


def _conditions() -> Iterator[Point]:
    """Every method at B = 8, where T is a multiple of the block, launched from Python, and with a hot cache."""
    for T in MAIN_LENGTHS:
        yield point(Shape(8, T), others(), (0.02, 0.18, 1.0), stages=False)
    for T in COMPLETING:
        yield point(Shape(1, T), others(), (0.18,), stages=False)
    for T in MAIN_LENGTHS:
        yield point(Shape(1, T), {**FFD_KNOBS, **others()}, (0.18,), OTHER_MODES, stages=False)


def _components(shape: Shape) -> Point:
    """The ablation's grid and the exact rules per token and head, all keeping the same share; FFD is its fused point.

    The planted blocks carry all the mass, so that nearly all of it keeps what the margin keeps. Elsewhere than at
    `MAIN_LENGTHS` the paper's variants V1 to V4 alone.
    """
    from ffd.methods.component import BITS, COST_KNOBS, PATHS

    mass: dict[str, Any] = {"p": 0.999}
    bits = sorted(BITS, key=(2, 16).__contains__, reverse=True)  # the paper's first, should time run out
    grid = [("component", {"bits": b, "select": s, "path": p, **mass}) for b in bits for s in COST_KNOBS for p in PATHS]
    if shape.T in MAIN_LENGTHS:
        grid += [("topk", {}), ("topp", mass), ("topdelta", {})]
    else:
        grid = [(name, knobs) for name, knobs in grid if _is_papers(**knobs)]
    chosen = tuple(e for name, knobs in grid for e in entries(name, knobs, shape, (COMPONENT_KEPT,)))
    return Point(shape, (Mode(),), chosen, stages=False)


def _is_papers(bits: int, select: str, path: str, **_: Any) -> bool:
    return bits in (2, 16) and select in ("topk", "topdelta") and path == "decoupled"
