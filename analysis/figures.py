"""The paper's figures from what was run: series as data first, then drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from analysis.drawing import Figure, Series
from analysis.kernel import latency, roof, roofline
from analysis.labels import distinct_labels
from analysis.load import Outputs, Run
from analysis.measurements import kernel_timings
from analysis.pareto import pareto
from analysis.tables.selection import keep_ratios, layer_sparsity
from analysis.tables.sources import recipe


def build_figures(outputs: Outputs, size: str | None = None) -> list[Figure]:
    """All figures that have data; recipes as in `analysis.tables.build_tables`."""
    quality = _runs(outputs, size, "retrieval_quality")
    heads, layers = _runs(outputs, size, "headwise"), _runs(outputs, size, "sparsity_by_layer")
    scored = _runs(outputs, size, "ruler_32k")
    kernel = kernel_timings(outputs)
    views = [
        _against("recall_kept", quality, "sparsity.keep_io", "fidelity.mass_recall", "kept share", "mass recall"),
        _against("lse_kept", quality, "sparsity.keep_io", "fidelity.lse_error_mean", "kept share", "LSE error, nat"),
        _by_layer("spearman_by_layer", "Rank correlation by layer", "Spearman", quality, _spearman),
        _by_layer("sparsity_by_layer", "Sparsity by layer", "tokens not loaded, %", layers, layer_sparsity),
        *(_heat(run) for run in heads[:1]),
        *(_distribution(run) for run in heads[:1]),
        *pareto(scored, quality, kernel),
        latency(kernel),
        roofline(kernel, roof(kernel)),
    ]
    return [figure for figure in views if any(s.x for s in figure.series)]


def _runs(outputs: Outputs, size: str | None, name: str) -> list[Run]:
    return [source.run for source in recipe(outputs, name, size).sources if source.run is not None]


def _titled(runs: Sequence[Run], title: str) -> str:
    return title + (" (random weights)" if any(run.random_weights for run in runs) else "")


def _against(name: str, runs: Sequence[Run], x: str, y: str, x_label: str, y_label: str) -> Figure:
    """One line per method through its runs, ordered along x."""
    series = []
    for method in dict.fromkeys(str(run.method["name"]) for run in runs):
        own = [run for run in runs if run.method["name"] == method]
        points = sorted(
            (fx, fy, r.run_id) for r in own if (fx := r.figure(x)) is not None and (fy := r.figure(y)) is not None
        )
        series.append(Series(method, *(tuple(p[i] for p in points) for i in range(3))))
    return Figure(name, _titled(runs, f"{y_label} against {x_label}"), x_label, y_label, tuple(series))


def _by_layer(
    name: str, title: str, y_label: str, runs: Sequence[Run], values: Callable[[Run], dict[int, float]]
) -> Figure:
    labels = distinct_labels([run.method for run in runs])
    series = []
    for label, run in zip(labels, runs, strict=True):
        layers = values(run)
        series.append(Series(label, tuple(map(float, layers)), tuple(layers.values()), (run.run_id,) * len(layers)))
    return Figure(name, _titled(runs, title), "layer", y_label, tuple(series))


def _spearman(run: Run) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for row in run.fidelity:
        if row.get("spearman") is not None and row["layer"] is not None:
            found.setdefault(int(row["layer"]), []).append(float(row["spearman"] or 0.0))
    return {layer: sum(values) / len(values) for layer, values in sorted(found.items())}


def _heat(run: Run) -> Figure:
    rows = [row for row in run.layers if row["keep_head"] is not None]
    series = Series(
        run.run_id,
        tuple(float(row["head"]) for row in rows),
        tuple(float(row["layer"]) for row in rows),
        z=tuple(100 * float(row["keep_head"]) for row in rows),
    )
    return Figure(
        "keep_heads", _titled([run], "Kept share by layer and head"), "query head", "layer", (series,), "grid"
    )


def _distribution(run: Run) -> Figure:
    kept = tuple(keep_ratios(run))
    title = _titled([run], "Kept share over layer-head pairs")
    return Figure("keep_distribution", title, "kept, %", "pairs", (Series(run.run_id, kept, ()),), "histogram")
