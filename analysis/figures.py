"""The paper's figures from what was run: series as data first, then drawn."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.files import write_text
from analysis.labels import distinct_labels
from analysis.load import Outputs, Run
from analysis.measurements import kernel_timings, timing_labels
from analysis.tables.selection import keep_ratios, layer_sparsity
from analysis.tables.sources import recipe
from analysis.terminal import average


@dataclass(frozen=True)
class Series:
    """One line, cloud, histogram or (with ``z``) grid."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    names: tuple[str, ...] = ()
    """What each point is, for the data file: run ids, usually."""
    z: tuple[float, ...] = ()
    """Colour of each point of a grid."""


@dataclass(frozen=True)
class Figure:
    """One figure."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    kind: str = "line"
    """line, points, histogram or grid."""
    log: bool = False
    """Both axes logarithmic."""


def build_figures(outputs: Outputs, size: str | None = None) -> list[Figure]:
    """All figures that have data; recipes as in `analysis.tables.build_tables`."""
    quality = _runs(outputs, size, "retrieval_quality")
    heads, layers = _runs(outputs, size, "headwise"), _runs(outputs, size, "sparsity_by_layer")
    scored = _runs(outputs, size, "ruler_32k")
    views = [
        _against("recall_kept", quality, "sparsity.keep_io", "fidelity.mass_recall", "kept share", "mass recall"),
        _against("lse_kept", quality, "sparsity.keep_io", "fidelity.lse_error_mean", "kept share", "LSE error, nat"),
        _by_layer("spearman_by_layer", "Rank correlation by layer", "Spearman", quality, _spearman),
        _by_layer("sparsity_by_layer", "Sparsity by layer", "tokens not loaded, %", layers, layer_sparsity),
        *(_heat(run) for run in heads[:1]),
        *(_distribution(run) for run in heads[:1]),
        *_pareto(scored, quality),
        _latency(outputs),
    ]
    return [figure for figure in views if any(s.x for s in figure.series)]


def write_figures(figures: Iterable[Figure], folder: Path) -> list[Path]:
    """Write every figure as SVG with its data as CSV beside it, in place of earlier ones; returns their paths."""
    for stale in (*folder.glob("*.svg"), *folder.glob("*.csv")):
        stale.unlink()
    written = []
    for figure in figures:
        written.append(write_text(folder / f"{figure.name}.svg", svg(figure)))
        written.append(write_text(folder / f"{figure.name}.csv", data(figure)))
    return written


def data(figure: Figure) -> str:
    """The figure's numbers as CSV."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["series", "name", figure.x_label, figure.y_label, "z"])
    for series in figure.series:
        for i, x in enumerate(series.x):
            name = series.names[i] if series.names else ""
            writer.writerow([series.label, name, x, series.y[i] if series.y else "", series.z[i] if series.z else ""])
    return stream.getvalue()


def svg(figure: Figure) -> str:
    """The figure drawn; equal data give equal bytes."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({"svg.hashsalt": figure.name, "svg.fonttype": "none", "font.size": 9, "axes.grid": True,
                         "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}):  # fmt: skip
        drawing, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
        for series in figure.series:
            if figure.kind == "histogram":
                axes.hist(series.x, bins=20, range=(0, 100), alpha=0.7, label=series.label)
            elif figure.kind == "grid":
                axes.grid(visible=False)
                columns, rows = sorted(set(series.x)), sorted(set(series.y))
                shares = dict(zip(zip(series.x, series.y, strict=True), series.z, strict=True))
                grid = [[shares.get((x, y), float("nan")) for x in columns] for y in rows]
                shown = axes.pcolormesh(columns, rows, grid, vmin=0, vmax=100, cmap="viridis", shading="nearest")
                drawing.colorbar(shown, label="kept, %")
            else:
                axes.plot(series.x, series.y, "o" if figure.kind == "points" else "o-", label=series.label, ms=4)
        if figure.log:
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.set(title=figure.title, xlabel=figure.x_label, ylabel=figure.y_label)
        if figure.kind != "grid":
            axes.legend(fontsize=8, frameon=False)
        stream = io.StringIO()
        drawing.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(drawing)
    return stream.getvalue()


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


def _pareto(scored: Sequence[Run], quality: Sequence[Run]) -> list[Figure]:
    """What is lost against what is read, and against the time of a decode step in the same run."""
    figures = []
    for x, x_label, of in (
        ("bytes", "bytes read of dense", lambda run: run.figure("sparsity.bytes_ratio")),
        ("time", "ms per decode step", _step_ms),
    ):
        for y, y_label, runs, value in (
            ("accuracy", "average score", scored, average),
            ("recall", "mass recall", quality, lambda run: run.figure("fidelity.mass_recall")),
            ("lse", "LSE error, mean, nat", quality, lambda run: run.figure("fidelity.lse_error_mean")),
            ("kl", "KL to dense, nat", quality, lambda run: run.figure("forced.kl_mean")),
        ):
            figures.append(_cloud(f"pareto_{y}_{x}", x_label, y_label, runs, of, value))
    return figures


def _cloud(
    name: str,
    x_label: str,
    y_label: str,
    runs: Sequence[Run],
    x: Callable[[Run], float | None],
    y: Callable[[Run], float | None],
) -> Figure:
    series = []
    for label, run in zip(distinct_labels([r.method for r in runs]), runs, strict=True):
        fx, fy = x(run), y(run)
        if fx is not None and fy is not None:
            series.append(Series(label, (fx,), (fy,), (run.run_id,)))
    return Figure(name, _titled(runs, f"{y_label} against {x_label}"), x_label, y_label, tuple(series), "points")


def _step_ms(run: Run) -> float | None:
    rate = run.figure("timing.decode_tok_s")
    return 1000 / rate if rate else None


def _latency(outputs: Outputs) -> Figure:
    """Time of one layer's step against the context, batch size 1."""
    timings = [
        t for t in kernel_timings(outputs) if t.row["B"] == 1 and {"attend", "reduce"} <= set(t.row.get("step", ()))
    ]
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for label, t in zip(timing_labels(timings), timings, strict=True):
        lines.setdefault(label, []).append((float(t.row["T"]), float(t.row["time_us"]), t.origin))
    series = tuple(
        Series(label, *(tuple(p[i] for p in sorted(points)) for i in range(3))) for label, points in lines.items()
    )
    device = ", ".join(dict.fromkeys(t.device for t in timings))
    return Figure("kernel_latency", f"One layer's decode step, {device}", "tokens", "us", series, log=True)
