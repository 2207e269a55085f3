"""Every method's decode step side by side: over lengths at equal kept shares, and at a batch of 8, for the document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

from analysis.components import is_component
from analysis.kernel import DENSE, MATCHED, by_length

_KEPT = (0.02, MATCHED, 1.0)
_LENGTHS = tuple(1024 * thousands for thousands in (4, 16, 32, 64, 128, 256))
_BATCH, _BATCH_LENGTHS = 8, (16384, 65536)
_OFF = 0.05
"""Share of the target beyond which a cell says what was kept."""
Found = Mapping[int, Mapping[Any, Mapping[str, Any]]]
"""Rows of one batch size by length, then by method and kept target."""


def method_lines(record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Times of all methods.

    Parameters
    ----------
    record
        What stands around the rows.
    rows
        Those that may be compared.
    """
    rows = [row for row in rows if not is_component(row["method"])]
    names = sorted({r["method"] for r in rows if r["method"] not in DENSE}, key=lambda name: (name != "ffd", name))
    single, batch = (by_length(r for r in rows if r["B"] == size) for size in (1, _BATCH))
    yield fill(
        f"{record['gpu']}, revision {str(record['revision'])[:7]}, {record['date']}. Times in us; in brackets the "
        "speed-ups on the fastest dense row and on SDPA flash of the same process, and what was kept where that is "
        f"more than {100 * _OFF:g} % of the target away from it.",
        120,
    )
    for kept in _KEPT:
        yield from _over_lengths(names, single, kept)
    yield from _over_shares(names, batch)
    yield ""
    yield from _slopes(names, record["slopes_us_per_1000_tokens"])
    yield from _refused(names, record.get("refused", ()))
    yield ""
    yield "![time of a decode step of every method against the context](figures/kernel_methods.svg)"


def _over_lengths(names: Iterable[str], found: Found, kept: float) -> Iterator[str]:
    """One kept share: methods down, lengths across; dense attention with what keeps everything."""
    yield ""
    yield f"| {100 * kept:g} % kept | {_joined(f'{length // 1024}K' for length in _LENGTHS)} |"
    yield "|---|" + "---:|" * len(_LENGTHS)
    selects = {name for own in found.values() for name, target in _sparse(own) if target < 1.0}
    for name in names:
        if kept == 1.0 or name in selects:
            yield f"| {name} | {_joined(_cell(found.get(length, {}).get((name, kept))) for length in _LENGTHS)} |"
    for name, label in DENSE.items() if kept == 1.0 else ():
        if any(name in own for own in found.values()):
            yield f"| {label} | {_joined(_cell(found.get(length, {}).get(name)) for length in _LENGTHS)} |"


def _sparse(own: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    return (key for key in own if key not in DENSE)


def _over_shares(names: Iterable[str], found: Found) -> Iterator[str]:
    """A batch: methods down, lengths and kept shares across."""
    columns = [(length, kept) for length in _BATCH_LENGTHS for kept in _KEPT]
    yield ""
    yield f"| batch size {_BATCH} | {_joined(f'{n // 1024}K, {100 * kept:g} %' for n, kept in columns)} |"
    yield "|---|" + "---:|" * len(columns)
    for name in names:
        yield f"| {name} | {_joined(_cell(found.get(n, {}).get((name, kept))) for n, kept in columns)} |"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    beside = [f"{row[key] / row['time_us']:.2f}x" for key in ("best_dense_us", "sdpa_flash_us") if row.get(key)]
    if abs(row["kept"] - row["kept_target"]) > _OFF * row["kept_target"]:
        beside.append(f"{100 * row['kept']:.1f} % kept")
    return f"{row['time_us']:.1f}" + (f" ({', '.join(beside)})" if beside else "")


def _slopes(names: Iterable[str], slopes: Mapping[str, float]) -> Iterator[str]:
    wanted = [("dense", "dense"), *((name, f"{name} kept {MATCHED:g}") for name in names)]
    wanted += [(name, f"{name} kept 1") for name in names if f"{name} kept {MATCHED:g}" not in slopes]
    told = ", ".join(f"{name} {slopes[key]:.2f}" for name, key in wanted if key in slopes)
    yield f"Another 1000 tokens cost at {100 * MATCHED:g} % kept, in us: {told}."


def _refused(names: Iterable[str], refused: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What is missing in the tables for a reason."""
    for item in refused:
        if item["refused"].split()[0] in names:
            yield ""
            yield f"Not timed: {item['refused']} ({item['reason']})."


def _joined(cells: Iterable[str]) -> str:
    return " | ".join(cells)
