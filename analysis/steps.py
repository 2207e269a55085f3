"""Tables of whole decode steps, from records of the throughput runner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

_PROTOCOLS = ("paper-default", "paper-flash", "fair")


def protocol_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Tokens per second of whole steps by protocol; the sparse engine's beside the fair dense one."""
    yield f"Whole decode steps in tokens per second ({record.get('model', 'a model')}, {record['gpu']}):"
    yield ""
    columns = ("transformers, SDPA as shipped", "transformers, flash", "dense, our engine", "FFD, our engine")
    yield f"| batch, tokens | {' | '.join(columns)} |"
    yield "|---|" + "---:|" * len(columns)
    for (batch, tokens), rows in _points(record["rows"]).items():
        dense = {row["protocol"]: row for row in rows if row["method"] == "dense" and _as_shipped(row)}
        cells = [f"{dense[p]['tokens_per_second']:.0f}" if p in dense else "-" for p in _PROTOCOLS]
        fair = dense.get("fair")
        yield f"| {batch}, {tokens // 1024}K | {' | '.join(cells)} | {_sparse(rows, fair)} |"


def _points(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], list[Mapping[str, Any]]]:
    found: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "tokens_per_second" in row:
            found.setdefault((row["B"], row["T"]), []).append(row)
    return dict(sorted(found.items()))


def _as_shipped(row: Mapping[str, Any]) -> bool:
    """Whether the engine was free to fuse what it can; transformers' rows have nothing to say about it."""
    return row["protocol"] != "fair" or row.get("fuse", "auto") == "auto"


def _sparse(rows: Sequence[Mapping[str, Any]], fair: Mapping[str, Any] | None) -> str:
    own = [row for row in rows if row["method"] == "ffd" and row["protocol"] == "fair" and _as_shipped(row)]
    if not own:
        return "-"
    row = min(own, key=lambda r: abs((r["kept_target"] or 0) - 0.18))
    gain = f", {row['tokens_per_second'] / fair['tokens_per_second']:.2f}x dense" if fair else ""
    return f"{row['tokens_per_second']:.0f} ({100 * row['kept']:.0f} % kept{gain})"


def method_step_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Milliseconds of whole steps of every method under our engine, beside dense there, and what was loaded."""
    points = _points([row for row in record["rows"] if row["protocol"] == "fair" and _as_shipped(row)])
    names = dict.fromkeys(row["method"] for rows in points.values() for row in rows)
    yield fill(
        f"{record['model']}, {record['gpu']}, revision {str(record['revision'])[:7]}, {record['date']}. Milliseconds "
        "a step; in brackets the speed-up on dense under the same engine in the same run, and the share of the "
        "tokens that was loaded.",
        120,
    )
    yield ""
    columns = [f"batch {batch}, {tokens // 1024}K" for batch, tokens in points]
    yield f"| method | {' | '.join(columns)} |"
    yield "|---|" + "---:|" * len(points)
    for name in names:
        cells = [_beside_dense({row["method"]: row for row in rows}, name) for rows in points.values()]
        yield f"| {name} | {' | '.join(cells)} |"


def _beside_dense(rows: Mapping[str, Mapping[str, Any]], name: str) -> str:
    if name not in rows:
        return "-"
    row, dense = rows[name], rows.get("dense")
    said = [] if dense is None else [f"{dense['ms_per_step'] / row['ms_per_step']:.2f}x"]
    said.append(f"{100 * row['kept']:.0f} %")
    return f"{row['ms_per_step']:.2f}" + ("" if row is dense else f" ({', '.join(said)})")
