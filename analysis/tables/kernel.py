"""One decode step of one layer: times, speed-ups on dense attention, and the launches of FFD's step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from analysis.cells import Cell, Table
from analysis.components import RULES, grid_point, is_component
from analysis.kernel import whole_steps
from analysis.measurements import Timing, timing_labels
from analysis.published import Published, of_artifact, quotations

_COMMAND = "not run: python run.py experiment=kernel_latency, on a GPU"
_MARGIN_THAT_KEEPS = {0.18: "ffd delta=5", 0.27: "ffd delta=7"}
"""The paper's margins by the share that it says they keep on average."""


def kernel_tables(timings: Sequence[Timing]) -> list[Table]:
    """Times, speed-ups on the fastest dense row of the same run, and launches; interpreted times are no times."""
    timed = [t for t in timings if t.row.get("timing") != "interpreted"]
    steps = whole_steps(timed)
    components = [t for t in steps if is_component(t.row["method"])]
    whole = [t for t in steps if t not in components]
    lines = of_artifact("kernel_latency")
    placed = [p for t in whole for p in quoted(t, lines)]
    notes = quotations([p for p in lines if p not in placed])
    gains = [t for t in whole if t.row.get("best_dense_us")]
    launches = [t for t in timed if t not in steps]
    return [
        _grid("kernel_latency", "One decode step of one layer, us", whole, _time(lines), 1, notes),
        _grid("kernel_speedup", "Speed-up on the fastest dense attention of the same run", gains, _gain, 2),
        _launches(launches),
        _components(components),
    ]


Value = Callable[[Timing], tuple[float, dict[str, Any]]]
"""A cell's number, and what stands beside it."""


def _time(lines: Sequence[Published]) -> Value:
    def value(timing: Timing) -> tuple[float, dict[str, Any]]:
        found = quoted(timing, lines)
        beside = ", ".join(f"{p.value} {p.unit} ({p.hardware})" for p in found) or None
        return float(timing.row["time_us"]), {"published": beside, "source": found[0].source if found else None}

    return value


def _gain(timing: Timing) -> tuple[float, dict[str, Any]]:
    return float(timing.row["best_dense_us"] / timing.row["time_us"]), {}


def _grid(
    name: str, title: str, timings: Sequence[Timing], value: Value, digits: int, notes: Sequence[str] = ()
) -> Table:
    """Shapes and kept shares down, methods across; what reads everything stands beside every share of its shape."""
    usual = usual_geometry(timings)
    selecting = {t.row["method"] for t in timings if t.row.get("kept_target") not in (None, 1.0)}
    columns: dict[str, None] = {}
    cells: dict[tuple[str, str], dict[float | None, dict[str, Cell]]] = {}
    for timing in timings:
        method, target = timing.row["method"], timing.row.get("kept_target")
        columns[method] = None
        shares = cells.setdefault((place(timing.row, usual), timing.mark), {})
        own = shares.setdefault(target if method in selecting else None, {})
        number, beside = value(timing)
        own.setdefault(method, Cell(number, digits, run_ids=(timing.origin,), **beside))
    rows = []
    for (where, mark), shares in cells.items():
        always = shares.pop(None, {})
        for share, own in sorted(shares.items()) or [(None, {})]:
            shown = where if share is None else f"{where}, {100 * share:g} % kept"
            rows.append((shown + mark, tuple((always | own).get(column, Cell()) for column in columns)))
    return Table(name, title, tuple(columns), tuple(rows), heading(timings, usual), tuple(notes))


def _launches(timings: Sequence[Timing]) -> Table:
    """Launches across; shape and kept share down."""
    usual = usual_geometry(timings)
    columns = tuple(dict.fromkeys(" ".join(t.row["step"]) for t in timings))
    cells: dict[str, dict[str, Cell]] = {}
    for label, timing in zip(timing_labels(timings), timings, strict=True):
        own = cells.setdefault(f"{place(timing.row, usual)} {label}{timing.mark}", {})
        own.setdefault(" ".join(timing.row["step"]), Cell(float(timing.row["time_us"]), 1, run_ids=(timing.origin,)))
    rows = tuple((where, tuple(own.get(column, Cell()) for column in columns))
                 for where, own in cells.items())  # fmt: skip
    return Table("kernel_stages", "Launches of one decode step, each alone, us", columns, rows, heading(timings, usual))


def _components(timings: Sequence[Timing]) -> Table:
    """Rules of selection across; length, scan and path down."""
    usual = usual_geometry(timings)
    cells: dict[str, dict[str, Cell]] = {}
    for timing in timings:
        scan, rule, path = grid_point(timing.row["method"])
        own = cells.setdefault(f"{place(timing.row, usual)}, {scan}, {path}{timing.mark}", {})
        own.setdefault(rule, Cell(float(timing.row["time_us"]), 1, run_ids=(timing.origin,)))
    rows = tuple((where, tuple(own.get(r, Cell()) for r in RULES)) for where, own in cells.items())
    title = "One decode step by precision of the scan, rule and path at 27.3 % kept, us"
    return Table("kernel_components", title, RULES, rows, heading(timings, usual))


def usual_geometry(timings: Sequence[Timing]) -> tuple[Any, ...]:
    """The heads, head dimension and dtype of most rows."""
    found = Counter(_geometry(t.row) for t in timings)
    return found.most_common(1)[0][0] if found else ()


def _geometry(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("Hq", "Hkv", "d", "dtype"))


def place(row: Mapping[str, Any], usual: tuple[Any, ...]) -> str:
    """Shape and conditions, as far as they are not the usual ones."""
    words = [f"B={row['B']} T={row['T']}"]
    if _geometry(row) != usual:
        words.append("Hq={} Hkv={} d={} {}".format(*_geometry(row)))
    words += [word for word in ("eager",) if row.get("timing") == word]
    words += ["hot L2"] if row.get("l2") == "hot" else []
    words += [f"captured ({row['trace']})"] if row.get("trace") else []
    return " ".join(words)


def heading(timings: Sequence[Timing], usual: tuple[Any, ...]) -> tuple[str, ...]:
    """What holds for every row that does not say otherwise."""
    common = "Hq={} Hkv={} d={} {}".format(*usual) if usual else ""
    return tuple(dict.fromkeys(f"{t.subject}, {common}, cold L2" for t in timings)) or (_COMMAND,)


def quoted(timing: Timing, lines: Sequence[Published]) -> list[Published]:
    """The paper's numbers at this length: flash attention's, and FFD's at the margin that keeps this share."""
    row = timing.row
    names = {"sdpa_flash": "flash_attention_2", "ffd": _MARGIN_THAT_KEEPS.get(row.get("kept_target") or 0.0)}
    name, setting = names.get(row["method"]), f"context={round(row['T'] / 1024)}K"
    usual = row["B"] == 1 and row.get("timing", "graph") == "graph" and row.get("l2", "cold") == "cold"
    return [p for p in lines if usual and p.method == name and p.setting == setting and p.metric == "latency"]
