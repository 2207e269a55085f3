"""Kernel latency, throughput, and the speed of the components."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from analysis.cells import Cell, Table
from analysis.load import Outputs
from analysis.measurements import Timing, kernel_timings, step_timings
from analysis.published import Published, of_artifact, quotations

_VARIANTS = {
    "V1": ("16-bit scan, top-k, not fused", "topk"),
    "V2": ("16-bit scan, top-delta, not fused", "topdelta"),
    "V3": ("2-bit scan, top-k, not fused", None),
    "V4": ("2-bit scan, top-delta, not fused", None),
}
"""The paper's variants and our method that is one, where there is one."""


def speed_tables(outputs: Outputs, size: str | None) -> list[Table]:
    """All tables of times; ``size`` does not apply: what was timed is shown with its shape."""
    kernel, steps = kernel_timings(outputs), step_timings(outputs)
    whole = [t for t in kernel if {"attend", "reduce"} <= set(t.row.get("step", ()))]
    latency = _grid(
        "kernel_latency",
        "One decode step of one layer, us",
        whole,
        lambda t: f"B={t.row['B']} T={t.row['T']}",
        _kernel_column,
        "time_us",
        of_artifact("kernel_latency"),
        "python run.py experiment=kernel_latency, on a GPU",
    )
    throughput = _grid(
        "throughput",
        "Tokens per second of whole decode steps",
        steps,
        lambda t: f"B={t.row['B']} T={t.row['T']}",
        lambda t: f"{t.row['protocol']} {t.row['method']}" + _kept(t),
        "tokens_per_second",
        of_artifact("throughput", "cuda_graph"),
        "python run.py experiment=throughput, on a GPU",
    )
    return [latency, throughput, _components(steps)]


def _grid(
    name: str,
    title: str,
    timings: Sequence[Timing],
    row_of: Callable[[Timing], str],
    column_of: Callable[[Timing], str],
    value: str,
    lines: Sequence[Published],
    command: str,
) -> Table:
    columns = list(dict.fromkeys(column_of(t) for t in timings))
    rows = []
    for row in dict.fromkeys(row_of(t) for t in timings):
        own = {column_of(t): t for t in timings if row_of(t) == row}
        cells = tuple(_cell(own.get(column), value, f"{column} was not timed at {row}") for column in columns)
        rows.append((row, cells))
    quoted = quotations(lines)
    devices = ", ".join(dict.fromkeys(t.device for t in timings))
    heading = (f"ours: {devices}",) if timings else (f"not run: {command}",)
    return Table(name, title, tuple(columns), tuple(rows), heading, quoted)


def _kernel_column(timing: Timing) -> str:
    return str(timing.row["method"]) + _kept(timing)


def _kept(timing: Timing) -> str:
    target = timing.row.get("kept_target")
    return "" if target in (None, 1.0) else f" kept {100 * target:g} %"


def _cell(timing: Timing | None, value: str, why: str) -> Cell:
    if timing is None:
        return Cell(marks=("missing",), reason=why)
    return Cell(float(timing.row[value]), 1, run_ids=(timing.origin,))


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
    devices = ", ".join(dict.fromkeys(t.device for t in steps)) or "not run"
    return Table(
        "component_speed", "Components: tokens per second", ("tok/s",), tuple(rows), (f"ours: {devices}",), notes
    )


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
