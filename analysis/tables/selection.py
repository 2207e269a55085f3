"""What selection keeps and loses: recall, logsumexp error, rank correlation, heads, layers, matched budgets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from analysis.cells import Cell, Table
from analysis.load import Outputs, Run
from analysis.published import of_artifact, quotations
from analysis.tables.sources import NOT_ASKED, Recipe, Source, recipe

_QUALITY = (
    ("kept (loaded)", "sparsity.keep_io", 4),
    ("bytes of dense", "sparsity.bytes_ratio", 4),
    ("mass recall", "fidelity.mass_recall", 4),
    ("salient hit rate", "fidelity.salient_hit_rate", 4),
    ("LSE error, max (nat)", "fidelity.lse_error_max", 4),
    ("LSE error, mean (nat)", "fidelity.lse_error_mean", 5),
    ("Spearman", "fidelity.spearman", 4),
    ("output cosine", "fidelity.output_cos", 4),
    ("KL, mean (nat)", "forced.kl_mean", 5),
)


def selection_tables(outputs: Outputs, size: str | None) -> list[Table]:
    """Every table of the paper's analysis of selection."""
    quality = recipe(outputs, "retrieval_quality", size)
    matched = recipe(outputs, "selection", size)
    speed = of_artifact("selection_ablation")
    quoted = quotations(speed)
    return [
        _by_source("retrieval_quality", "Recall, logsumexp error and rank correlation", quality, ()),
        _by_source("selection", "Selection rules at one kept share (27.3 %)", matched, quoted),
        _headwise(recipe(outputs, "headwise", size)),
        _layers(recipe(outputs, "sparsity_by_layer", size)),
    ]


def _by_source(name: str, title: str, left: Recipe, notes: tuple[str, ...]) -> Table:
    rows = tuple((source.label, tuple(_figure(source, p, d) for _, p, d in _QUALITY)) for source in left.sources)
    return Table(name, title, tuple(column for column, _, _ in _QUALITY), rows, left.heading, notes)


def _figure(source: Source, path: str, digits: int, **fields: Any) -> Cell:
    if source.run is None:
        return source.cell(None, **fields)
    value = source.run.figure(path)
    if value is None and source.status == "complete":
        why = (source.run.summary.get("null_reasons") or {}).get(path)
        if why is None and path.partition(".")[0] not in source.run.summary:
            return Cell(None, digits, run_ids=(source.run.run_id,))  # its runner was not asked for it
        if why is None:
            return source.cell(None, reason=f"{path}: not measured by runner={source.run.runner}", **fields)
        # Undefined for a reason of its own, which is not a fault of the run.
        return Cell(None, digits, reason=why, run_ids=(source.run.run_id,), **fields)
    return source.cell(value, digits, n=len(source.run.samples), **fields)


def keep_ratios(run: Run) -> list[float]:
    """Kept share of every layer and query head."""
    return [100 * float(row["keep_head"]) for row in run.layers if row["keep_head"] is not None]


def _headwise(left: Recipe) -> Table:
    """The paper's statistics over all layer-head pairs, ours beside them."""
    lines = {(p.setting.split(" delta")[0], p.metric): p for p in of_artifact("headwise")}
    spread = "1024 layer-head pairs"
    rows = []
    for label, setting, metric in (
        ("smallest kept share, %", spread, "keep_ratio_min"),
        ("largest kept share, %", spread, "keep_ratio_max"),
        ("standard deviation over pairs, points", spread, "keep_ratio_std"),
        ("salient hit rate, mean, %", spread, "salient_hit_rate_mean"),
        ("kept share, proxy-error cases, %", "proxy-error cases", "keep_ratio_mean"),
        ("kept share, regular cases, %", "regular cases", "keep_ratio_mean"),
        ("salient hit rate, proxy-error cases, %", "proxy-error cases", "salient_hit_rate"),
        ("salient hit rate, regular cases, %", "regular cases", "salient_hit_rate"),
    ):
        quoted = lines[setting, metric]
        beside = {"published": quoted.text, "source": quoted.source}
        sources: Sequence[Source] = left.sources or (Source("ffd", {"name": "ffd"}, None, NOT_ASKED, None),)
        rows.append((label, tuple(_head_figure(s, setting, metric, beside) for s in sources)))
    labels = tuple(s.label for s in left.sources) or ("ffd",)
    return Table("headwise", "Kept share over layer-head pairs", labels, tuple(rows), left.heading)


def _head_figure(source: Source, setting: str, metric: str, beside: dict[str, str]) -> Cell:
    if source.run is None:
        return source.cell(None, **beside)
    kept = keep_ratios(source.run)
    group = "proxy_error" if setting == "proxy-error cases" else "regular"
    by_pairs = {"keep_ratio_min": min, "keep_ratio_max": max, "keep_ratio_std": statistics.pstdev}
    if metric in by_pairs:
        value = float(by_pairs[metric](kept)) if kept else None
        return source.cell(value, n=len(kept), **beside)
    path = {
        "salient_hit_rate_mean": "fidelity.salient_hit_rate",
        "keep_ratio_mean": f"fidelity.keep_head_{group}",
        "salient_hit_rate": f"fidelity.salient_hit_{group}",
    }[metric]
    share = source.run.figure(path)
    if share is None and source.status == "complete":
        why = (source.run.summary.get("null_reasons") or {}).get(path)
        return Cell(None, reason=why or "not measured", run_ids=(source.run.run_id,), **beside)
    return source.cell(None if share is None else 100 * share, n=len(source.run.samples), **beside)


def layer_sparsity(run: Run) -> dict[int, float]:
    """Share of tokens not loaded, by layer, in percent: mean over kv heads."""
    found: dict[int, dict[int, float]] = {}
    for row in run.layers:
        if row["keep_io"] is not None:
            found.setdefault(int(row["layer"]), {})[int(row["kv_head"])] = float(row["keep_io"])
    return {layer: 100 * (1 - statistics.fmean(heads.values())) for layer, heads in sorted(found.items())}


def _layers(left: Recipe) -> Table:
    lines = of_artifact("sparsity")
    by_layer = [({} if s.run is None else layer_sparsity(s.run)) for s in left.sources]
    average = []
    for source in left.sources:
        quoted = next((p for p in lines if p.is_of(source.method)), None)
        beside = {} if quoted is None else {"published": quoted.text, "source": quoted.source}
        own = None if source.run is None else source.run.figure("sparsity.sparsity")
        n = None if source.run is None else len(source.run.samples)
        average.append(source.cell(None if own is None else 100 * own, n=n, **beside))
    rows: list[tuple[str, tuple[Cell, ...]]] = [("average, %", tuple(average))] if average else []
    for layer in sorted({layer for layers in by_layer for layer in layers}):
        cells = (s.cell(values.get(layer)) for s, values in zip(left.sources, by_layer, strict=True))
        rows.append((f"layer {layer}", tuple(cells)))
    notes = quotations([p for p in lines if not any(p.is_of(s.method) for s in left.sources)])
    labels = tuple(s.label for s in left.sources)
    return Table(
        "sparsity_by_layer", "Sparsity by layer: tokens not loaded, %", labels, tuple(rows), left.heading, notes
    )
