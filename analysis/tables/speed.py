"""Kernel latency, throughput, and the speed of the components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.cells import Cell, Table
from analysis.load import Outputs
from analysis.measurements import Timing, kernel_timings, step_timings, timing_labels
from analysis.published import Published, of_artifact, quotations
from analysis.tables.kernel import kernel_tables

_VARIANTS = {
    "V1": ("16-bit scan, top-k, not fused", "topk"),
    "V2": ("16-bit scan, top-delta, not fused", "topdelta"),
    "V3": ("2-bit scan, top-k, not fused", None),
    "V4": ("2-bit scan, top-delta, not fused", None),
}
"""The paper's variants and our method that is one, where there is one."""

_MARGIN_THAT_KEEPS = {0.18: "ffd delta=5", 0.27: "ffd delta=7"}
"""The paper's margins by the share that it says they keep on average."""


def speed_tables(outputs: Outputs, size: str | None) -> list[Table]:
    """All tables of times; ``size`` does not apply: what was timed is shown with its shape."""
    kernel, steps = kernel_timings(outputs), step_timings(outputs)
    throughput = _grid(
        "throughput",
        "Tokens per second of whole decode steps",
        steps,
        "tokens_per_second",
        of_artifact("throughput", "cuda_graph"),
        "python run.py experiment=throughput, on a GPU",
    )
    return [*kernel_tables(kernel), throughput, _components(steps)]


def _grid(
    name: str, title: str, timings: Sequence[Timing], value: str, lines: Sequence[Published], command: str
) -> Table:
    """Shapes down, methods across."""
    cells: dict[str, dict[str, Timing]] = {}
    columns: dict[str, None] = {}
    for column, timing in zip(timing_labels(timings), timings, strict=True):
        columns[column] = None
        cells.setdefault(f"B={timing.row['B']} T={timing.row['T']}", {})[column] = timing
    rows = tuple(
        (row, tuple(_cell(own.get(column), value, lines, f"{column} was not timed at {row}") for column in columns))
        for row, own in cells.items()
    )
    heading = tuple(dict.fromkeys(f"ours: {_conditions(t)}" for t in timings)) or (f"not run: {command}",)
    placed = [p for t in timings for p in _quoted(t, lines)]
    notes = quotations([p for p in lines if p not in placed])
    return Table(name, title, tuple(columns), rows, heading, notes)


def _conditions(timing: Timing) -> str:
    """What a time depends on beside the table's axes."""
    row = timing.row
    geometry = f"Hq={row['Hq']} Hkv={row['Hkv']} d={row['d']} {row['dtype']}" if "Hkv" in row else timing.model
    parts = (timing.device, geometry, f"{row['l2']} L2" if "l2" in row else "")
    return ", ".join(part for part in parts if part)


def _cell(timing: Timing | None, value: str, lines: Sequence[Published], why: str) -> Cell:
    if timing is None:
        return Cell(marks=("missing",), reason=why)
    quoted = _quoted(timing, lines)
    beside = ", ".join(f"{p.value} {p.unit} ({p.hardware})" for p in quoted) or None
    source = quoted[0].source if quoted else None
    return Cell(float(timing.row[value]), 1, run_ids=(timing.origin,), published=beside, source=source)


def _quoted(timing: Timing, lines: Sequence[Published]) -> list[Published]:
    """The paper's numbers at this length: flash attention's, and FFD's at the margin that keeps this share."""
    row = timing.row
    if row["B"] != 1:
        return []
    if row["method"] == "sdpa_flash" or row.get("protocol") == "paper-flash":
        names = {"flash_attention_2"}
    elif row["method"] == "ffd":
        names = {_MARGIN_THAT_KEEPS.get(row["kept_target"], "")} if "protocol" not in row else {"ffd"}
    else:
        return []
    setting = f"context={round(row['T'] / 1024)}K"
    return [p for p in lines if p.method in names and p.setting == setting and p.metric in ("latency", "throughput")]


def _components(steps: Sequence[Timing]) -> Table:
    """The paper's four variants beside our methods of the same scan and rule."""
    lines = {p.method: p for p in of_artifact("component_ablation")}
    rows: list[tuple[str, tuple[Cell, ...]]] = []
    for variant, (meaning, method) in _VARIANTS.items():
        quoted = lines[variant]
        rows.append((f"{variant}: {meaning}", (_component(steps, method, quoted),)))
    for method in ("ffd", "dense"):
        rows.append((f"{method}: fused", (_component(steps, method, None),)))
    gains = [p for p in of_artifact("component_ablation", "selection_ablation") if p.metric == "speedup"]
    notes = quotations(gains)
    title = "Components: tokens per second, batch size 1"
    heading = tuple(dict.fromkeys(f"ours: {_conditions(t)}" for t in steps)) or ("not run",)
    return Table("component_speed", title, ("tok/s",), tuple(rows), heading, notes)


def _component(steps: Sequence[Timing], method: str | None, quoted: Published | None) -> Cell:
    beside: dict[str, Any] = {} if quoted is None else {"published": quoted.text, "source": quoted.source}
    if method is None:
        return Cell(marks=("missing",), reason="no method scans 2-bit codes outside the fused kernel", **beside)
    fair = [t for t in steps if t.row["method"] == method and t.row["protocol"] == "fair" and t.row["B"] == 1]
    if not fair:
        return Cell(
            marks=("missing",), reason=f"{method}: not timed (python run.py experiment=component_speed)", **beside
        )
    first = min(fair, key=lambda t: abs(t.row["T"] - 16384))
    return Cell(float(first.row["tokens_per_second"]), 1, run_ids=(first.origin,), **beside)
