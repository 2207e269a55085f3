"""A figure as data, and drawn: the same data give the same bytes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from analysis.files import write_text

_MOST_INSIDE = 8
"""Series whose names stand inside the axes."""


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
    bound: bool = False
    """A limit, drawn dashed and without markers."""


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
    x_ticks: tuple[tuple[float, str], ...] = ()
    """Places and their names, in place of numbers."""


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
    """The figure drawn."""
    import matplotlib as mpl
    import matplotlib.ticker

    mpl.use("svg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({"svg.hashsalt": figure.name, "svg.fonttype": "none", "font.size": 9, "axes.grid": True,
                         "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}):  # fmt: skip
        # Many names do not fit inside the axes.
        many = len(figure.series) > _MOST_INSIDE
        size = (9.0, max(3.6, 0.2 * len(figure.series) + 0.5)) if many else (6.0, 3.6)
        drawing, axes = plt.subplots(figsize=size, layout="constrained")
        # Ten colours, then the same with another marker and dashes: no two series look alike.
        axes.set_prop_cycle(
            mpl.cycler(marker=["o", "s", "^"], linestyle=["-", "--", ":"]) * plt.rcParams["axes.prop_cycle"]
        )
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
            elif series.bound:
                axes.plot(series.x, series.y, "--", marker="", color="0.4", label=series.label, lw=1)
            else:
                style = {"linestyle": ""} if figure.kind == "points" else {}
                axes.plot(series.x, series.y, label=series.label, ms=4, **style)
        if figure.log:
            axes.set_xscale("log")
            axes.set_yscale("log")
            for axis, steps in ((axes.xaxis, (1.0,)), (axes.yaxis, (1.0, 2.0, 5.0))):
                axis.set_major_locator(mpl.ticker.LogLocator(subs=steps))
                axis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        if figure.x_ticks:
            axes.set_xticks(*zip(*figure.x_ticks, strict=True))
        axes.set(title=figure.title, xlabel=figure.x_label, ylabel=figure.y_label)
        if many:
            drawing.legend(fontsize=8, frameon=False, loc="outside right upper")
        elif figure.kind != "grid":
            axes.legend(fontsize=8, frameon=False)
        stream = io.StringIO()
        drawing.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(drawing)
    return stream.getvalue()
