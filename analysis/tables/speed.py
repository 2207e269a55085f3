"""Kernel latency, throughput, and the speed of the components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.cells import Cell, Table
from analysis.load import Outputs
from analysis.measurements import Timing, break_even, kernel_timings, step_timings
from analysis.published import Published, of_artifact, quotations
from analysis.tables.kernel import kernel_tables
from analysis.tables.throughput import throughput_tables

_COMMAND = "python run.py experiment=component_speed"
_VARIANTS = {
    "V1": ("16-bit scan, top-k, not fused", "component 16 bit topk decoupled"),
    "V2": ("16-bit scan, top-delta, not fused", "component 16 bit topdelta decoupled"),
    "V3": ("2-bit scan, top-k, not fused", "component 2 bit topk decoupled"),
    "V4": ("2-bit scan, top-delta, not fused", "component 2 bit topdelta decoupled"),
}
"""The paper's variants and the points of our grid that they are."""


def speed_tables(outputs: Outputs, size: str | None) -> list[Table]:
    """All tables of times; ``size`` does not apply: what was timed is shown with its shape."""
    kernel, steps = kernel_timings(outputs), step_timings(outputs)
    return [*kernel_tables(kernel), *throughput_tables(steps, break_even(outputs)), _components(steps)]


def _conditions(timing: Timing) -> str:
    """What a time depends on beside the table's axes."""
    row = timing.row
    geometry = f"Hq={row['Hq']} Hkv={row['Hkv']} d={row['d']} {row['dtype']}" if "Hkv" in row else timing.model
    parts = (timing.subject, geometry, f"{row['l2']} L2" if "l2" in row else "")
    return ", ".join(part for part in parts if part)


def _components(steps: Sequence[Timing]) -> Table:
    """The paper's four variants beside our methods of the same scan and rule."""
    steps = _most_methods([t for t in steps if t.row["protocol"] == "fair" and t.row["B"] == 1])
    lines = {p.method: p for p in of_artifact("component_ablation")}
    rows: list[tuple[str, tuple[Cell, ...]]] = []
    for variant, (meaning, method) in _VARIANTS.items():
        quoted = lines[variant]
        rows.append(_component(f"{variant}: {meaning}", steps, method, quoted))
    for method in ("component 2 bit topk fused", "ffd", "dense"):
        rows.append(_component(method if "fused" in method else f"{method}: fused", steps, method, None))
    gains = [p for p in of_artifact("component_ablation", "selection_ablation") if p.metric == "speedup"]
    untimed = "; ".join(name for name, (cell,) in rows if cell.value is None)
    how = (f"not timed: {untimed} ({_COMMAND})",) if steps and untimed else ()
    notes = (*how, *quotations(gains))
    title = "Components: tokens per second, batch size 1" + (f", {steps[0].row['T']} tokens" if steps else "")
    heading = tuple(dict.fromkeys(_conditions(t) for t in steps)) or (f"not run: {_COMMAND}",)
    return Table("component_speed", title, ("tok/s",), tuple(rows), heading, notes)


def _most_methods(steps: Sequence[Timing]) -> Sequence[Timing]:
    """Steps on the one device, model and length at which most methods were timed: a column compares nothing else.

    Those of the outputs folder come before a committed record's.
    """
    alike: dict[tuple[str | None, str, str, int], list[Timing]] = {}
    for timing in steps:
        alike.setdefault((timing.record, timing.device, timing.model, timing.row["T"]), []).append(timing)

    def preference(own: list[Timing]) -> tuple[bool, int, int]:
        return own[0].record is None, len({timing.row["method"] for timing in own}), -abs(own[0].row["T"] - 16384)

    return max(alike.values(), key=preference, default=())


def _component(
    name: str, steps: Sequence[Timing], method: str, quoted: Published | None
) -> tuple[str, tuple[Cell, ...]]:
    beside: dict[str, Any] = {} if quoted is None else {"published": quoted.text, "source": quoted.source}
    for timing in steps:
        if timing.row["method"] == method:
            cell = Cell(float(timing.row["tokens_per_second"]), 1, run_ids=(timing.origin,), **beside)
            return name + timing.mark, (cell,)
    return name, (Cell(**beside),)
