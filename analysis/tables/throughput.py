"""Whole decode steps: one line per measured row, with what its protocol makes comparable beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.cells import Cell, Table
from analysis.measurements import Timing, timing_labels
from analysis.published import Published, of_artifact, quotations

_PAPER_METHODS = {"paper-flash": "flash_attention_2", "fair": "ffd"}
"""The paper's name of what a protocol times: its baseline, and FFD under its engine."""
_COLUMNS = (
    "tok/s", "ms/step", "x floor", "kept, %", "speed-up on fair dense", "on paper-default", "on paper-flash",
    "KV bytes/token", "of 16 bit, %", "peak GB",
)  # fmt: skip


def throughput_tables(steps: Sequence[Timing], crossings: Sequence[Timing]) -> list[Table]:
    """Steps, prefill and the graph ablation.

    Parameters
    ----------
    steps
        Rows of whole decode steps.
    crossings
        Sentences on where a method becomes faster than dense.
    """
    lines = of_artifact("throughput", "cuda_graph")
    placed = [p for timing in steps for p in _quoted(timing, lines)]
    notes = (*(f"{c.row['says']}{c.mark}" for c in crossings), *quotations([p for p in lines if p not in placed]))
    heading = _heading(steps)
    title = "Tokens per second of whole decode steps"
    rows = tuple(_step_row(label, timing, steps, lines) for label, timing in _labelled(steps))
    return [
        Table("throughput", title, _COLUMNS, rows, heading, notes),
        _prefill([t for t in steps if t.row.get("prefill_ms") is not None]),
        _ablation([t for t in steps if t.row.get("graph_ablation") is not None]),
    ]


def _heading(timings: Sequence[Timing]) -> tuple[str, ...]:
    subjects = dict.fromkeys(f"{t.subject}, {t.model}" for t in timings)
    return tuple(subjects) or ("not run: python run.py experiment=throughput, on a GPU",)


def _labelled(timings: Sequence[Timing]) -> Iterator[tuple[str, Timing]]:
    """Point, protocol, method and record; device, and model, of several. A baseline of several runs comes once."""
    subjects = {(t.device, t.model) for t in timings}
    by_device = len({device for device, _ in subjects}) == len(subjects)
    seen: set[tuple[str, str]] = set()
    for name, timing in zip(timing_labels(timings), timings, strict=True):
        row = timing.row
        unfused = " unfused" if row.get("fuse") == "false" and row["protocol"] == "fair" else ""
        where = [] if len(subjects) < 2 else [timing.device] if by_device else [timing.device, timing.model]
        # The mark of a record has the device already.
        told = ", ".join(word for word in where if timing.record is None or word != timing.device)
        label = f"B={row['B']} T={row['T']} {name}{unfused}{f' ({told})' if told else ''}{timing.mark}"
        if row["method"] != "dense" or (label, "dense") not in seen:
            seen.add((label, str(row["method"])))
            yield label, timing


def _step_row(
    label: str, timing: Timing, steps: Sequence[Timing], lines: Sequence[Published]
) -> tuple[str, tuple[Cell, ...]]:
    row, ids = timing.row, (timing.origin,)

    quoted = _quoted(timing, lines)
    beside = ", ".join(f"{p.value} {p.unit} ({p.hardware})" for p in quoted) or None
    source = quoted[0].source if quoted else None
    speed = Cell(float(row["tokens_per_second"]), 1, run_ids=ids, published=beside, source=source)
    ratios = (_speed_up(timing, steps, protocol) for protocol in ("fair", "paper-default", "paper-flash"))
    stored, dense = row.get("kv_bytes_per_token"), row.get("dense_kv_bytes_per_token")
    peak = row.get("peak_bytes")
    return label, (
        speed,
        Cell(row["ms_per_step"], 2, run_ids=ids),
        Cell(row["over_floor"], 2, run_ids=ids),
        Cell(100 * row["kept"], 1, run_ids=ids),
        *(Cell(ratio, 2, run_ids=ids) for ratio in ratios),
        Cell(stored, 0, run_ids=ids),
        Cell(None if stored is None or not dense else 100 * stored / dense, 1, run_ids=ids),
        Cell(None if peak is None else peak / 1e9, 1, run_ids=ids),
    )


def _speed_up(timing: Timing, steps: Sequence[Timing], protocol: str) -> float | None:
    """Over dense of a protocol at the same point of the same run."""
    row = timing.row
    for other in steps:
        peer = other.row
        same = other.origin == timing.origin and (peer["B"], peer["T"]) == (row["B"], row["T"])
        alike = peer.get("fuse") == row.get("fuse") or row["protocol"] != peer["protocol"]
        if same and alike and (peer["method"], peer["protocol"]) == ("dense", protocol):
            return float(peer["ms_per_step"]) / float(row["ms_per_step"])
    return None


def _prefill(timings: Sequence[Timing]) -> Table:
    columns = ("prefill, ms", "first token, ms", "storing alone, ms", "peak GB")
    rows = []
    for label, timing in _labelled(timings):
        row, peak = timing.row, timing.row.get("prefill_peak_bytes")
        cells = [Cell(row[key], 1, run_ids=(timing.origin,)) for key in ("prefill_ms", "ttft_ms", "store_ms")]
        memory = Cell(
            None if peak is None else peak / 1e9, 1, run_ids=(timing.origin,), reason="measured on a GPU only"
        )
        rows.append((label, (*cells, memory)))
    notes = ("storing alone: a copy of keys and values for dense; what others take longer builds thumbnails or codes",)
    return Table("prefill", "Prefill and time to first token", columns, tuple(rows), _heading(timings), notes)


def _ablation(timings: Sequence[Timing]) -> Table:
    arms = {"eager": "eager", "one_graph": "one graph for all lengths", "recaptured": "captured anew for each block"}
    rows = []
    for label, timing in _labelled(timings):
        figures = timing.row["graph_ablation"]
        rows.append((label, tuple(Cell(figures[arm], 2, run_ids=(timing.origin,)) for arm in (*arms, "capture"))))
    columns = (*arms.values(), "one capture")
    notes = ("captured anew: the published scheme, its captures spread over the steps of a block",)
    return Table("graph_ablation", "CUDA graphs: ms per step", columns, tuple(rows), _heading(timings), notes)


def _quoted(timing: Timing, lines: Sequence[Published]) -> list[Published]:
    """The paper's numbers at this length and batch size 1."""
    row = timing.row
    name = _PAPER_METHODS.get(row["protocol"])
    if row["B"] != 1 or (name == "ffd" and row["method"] != "ffd"):
        return []
    setting = f"context={round(row['T'] / 1024)}K"
    return [p for p in lines if p.method == name and p.setting == setting and p.metric == "throughput"]
