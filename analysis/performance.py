"""``python -m analysis measurements``: what documents say was measured, and figures, from the committed records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from analysis.components import selection_lines
from analysis.drawing import Figure, data, svg
from analysis.files import write_text
from analysis.kernel import DENSE, by_length, comparable, latency, methods, roofline
from analysis.measurements import COMMITTED, Timing
from analysis.methods import method_lines
from analysis.shapes import row_problem
from analysis.steps import method_step_lines, protocol_lines

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
KERNEL, THROUGHPUT, METHODS = "kernel-h200.json", "throughput-h200.json", "throughput-methods-h200.json"
BEGIN, END = "<!-- measured: python -m analysis measurements -->", "<!-- end of measured -->"
_KEPT = (0.02, 0.18, 1.0)
_OF_A_RECORD = ("gpu", "revision", "date", "rows")


def write_measurements(root: Path = ROOT, records: Path = COMMITTED) -> list[Path]:
    """Write the blocks into the documents and the figures beside them; returns the paths.

    Raises
    ------
    ValueError
        If a document has no place for its block, or a record is damaged; then nothing is written.
    """
    made = {root / name: with_block((root / name).read_text(), text, name) for name, text in blocks(records).items()}
    for figure in figures(records):
        made[root / "docs" / "figures" / f"{figure.name}.svg"] = svg(figure)
        made[root / "docs" / "figures" / f"{figure.name}.csv"] = data(figure)
    return [write_text(path, text) for path, text in made.items()]


def with_block(text: str, made: str, name: str) -> str:
    """The text with what lies between the markers replaced; raises `ValueError` where they are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{name}: expected the lines {BEGIN} and {END} around what is measured")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def blocks(records: Path = COMMITTED) -> dict[str, str]:
    """What stands between the markers of each document, by its path."""
    kernel, throughput = _record(records / KERNEL), _record(records / THROUGHPUT)
    return {
        "README.md": "\n".join([*_kernel_lines(kernel), "", *protocol_lines(throughput)]),
        "docs/performance.md": "\n".join(method_lines(kernel, [t.row for t in _timings(kernel)])),
        "docs/throughput.md": "\n".join(method_step_lines(_record(records / METHODS))),
        "docs/methods/component.md": "\n".join(selection_lines(kernel)),
    }


def figures(records: Path = COMMITTED) -> list[Figure]:
    """Time against context, and against bytes, of FFD at three kept shares and of dense attention; of every method."""
    record = _record(records / KERNEL)
    timings = _timings(record)
    chosen = [t for t in timings if t.row["method"] in DENSE or _is_shown(t.row)]
    return [latency(chosen), roofline(chosen, record["read_bandwidth_bytes_per_us"]), methods(timings)]


def _record(path: Path) -> dict[str, Any]:
    """A committed record; raises `ValueError` where it is damaged."""
    try:
        record = json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path}: not JSON") from None
    missing = [key for key in _OF_A_RECORD if not isinstance(record, dict) or key not in record]
    if missing or not isinstance(record["rows"], list) or not record["rows"]:
        raise ValueError(f"{path}: expected a record with rows, {', '.join(_OF_A_RECORD)}")
    for number, row in enumerate(record["rows"]):
        problem = row_problem(row)
        if problem is not None:
            raise ValueError(f"{path}: row {number} {problem}")
    return dict(record)


def _timings(record: Mapping[str, Any]) -> list[Timing]:
    return comparable([Timing("", str(record["gpu"]), "", row) for row in record["rows"]])


def _is_shown(row: Mapping[str, Any]) -> bool:
    return row["method"] == "ffd" and row["kept_target"] in _KEPT


def _kernel_lines(record: Mapping[str, Any]) -> Iterator[str]:
    rows = [t.row for t in _timings(record)]
    first = rows[0]
    single = by_length([row for row in rows if row["B"] == 1])
    present = [name for name in DENSE if any(name in found for found in single.values())]
    yield fill(
        f"One decode step of one layer on an {record['gpu']}: {first['Hq']} query and {first['Hkv']} kv heads, "
        f"d = {first['d']}, {first['dtype']}, batch size 1, cold L2, CUDA graph, everything from the append to the "
        f"reduction. Times in us; in brackets the speed-up on SDPA flash of the same run. Revision "
        f"{str(record['revision'])[:7]}, {record['date']}.",
        120,
    )
    yield ""
    sparse = _joined(f"FFD, {100 * kept:g} % kept" for kept in _KEPT)
    yield f"| tokens | {sparse} | {_joined(DENSE[name] for name in present)} |"
    yield "|---|" + "---:|" * (len(_KEPT) + len(present))
    for length, found in single.items():
        sparse = _joined(_time(found.get(("ffd", kept)), found.get("sdpa_flash")) for kept in _KEPT)
        yield f"| {length // 1024}K | {sparse} | {_joined(_time(found.get(name), None) for name in present)} |"
    yield ""
    slopes = record["slopes_us_per_1000_tokens"]
    named = [("dense", "dense"), *((f"ffd kept {k:g}", f"FFD at {100 * k:g} % kept") for k in _KEPT)]
    told = ", ".join(f"{slopes[key]:.2f} {text}" for key, text in named if key in slopes)
    yield f"Another 1000 tokens cost, in us: {told}."
    yield ""
    yield "![time of a decode step against the context](docs/figures/kernel_latency.svg)"
    yield "![time of a decode step against the bytes it must read](docs/figures/kernel_roofline.svg)"


def _time(row: Mapping[str, Any] | None, against: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    gain = f" ({against['time_us'] / row['time_us']:.1f}x)" if against else ""
    return f"{row['time_us']:.1f}{gain}"


def _joined(cells: Iterable[str]) -> str:
    return " | ".join(cells)
