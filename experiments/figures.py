"""Figures of fidelity runs: each an SVG with the numbers it shows in a CSV beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.fidelity import write_table

Row = Mapping[str, Any]


def draw(folder: Path, name: str, rows: Sequence[Row], plot: Callable[[Any], None], size: tuple[float, float]) -> None:
    """Write ``name.csv`` and ``name.svg``; nothing where there are no rows.

    Parameters
    ----------
    folder
        Created if needed.
    name
        File name without suffix.
    rows
        What is shown.
    plot
        Draws on a matplotlib figure.
    size
        Width and height, inches.
    """
    if not rows:
        return
    import matplotlib as mpl
    from matplotlib.figure import Figure

    write_table(folder / f"{name}.csv", [dict(row) for row in rows])
    with mpl.rc_context({"svg.hashsalt": name, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        plot(figure)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def by_layer(folder: Path, rows: Sequence[Row]) -> None:
    """Spearman correlation by layer: every head, and their mean."""
    data = [
        {"layer": row["layer"], "head": row["head"], "spearman": row["spearman"]}
        for row in rows
        if row["spearman"] is not None
    ]

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        axes.scatter([r["layer"] for r in data], [r["spearman"] for r in data], s=8, alpha=0.4, label="head")
        layers = sorted({r["layer"] for r in data})
        means = [_mean(r["spearman"] for r in data if r["layer"] == layer) for layer in layers]
        axes.plot(layers, means, color="black", label="mean")
        axes.set(xlabel="layer", ylabel="Spearman, estimate and exact")
        axes.legend(frameon=False)

    draw(folder, "spearman_by_layer", data, plot, (6, 3.2))


def keep_heat_map(folder: Path, rows: Sequence[Row]) -> None:
    """Kept share of every layer and query head."""
    data = [{"layer": r["layer"], "head": r["head"], "keep_head": r["keep_head"]} for r in rows]

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        layers, heads = (sorted({r[key] for r in data}) for key in ("layer", "head"))
        value = {(r["layer"], r["head"]): r["keep_head"] for r in data}
        grid = [[value[layer, head] for layer in layers] for head in heads]
        image = axes.imshow(grid, aspect="auto", vmin=0, vmax=1, cmap="viridis", origin="lower")
        axes.set_xticks(range(0, len(layers), max(1, len(layers) // 10)))
        axes.set_xticklabels(layers[:: max(1, len(layers) // 10)])
        axes.set(xlabel="layer", ylabel="query head")
        figure.colorbar(image, ax=axes, label="kept share (own selection)")

    draw(folder, "keep_heat_map", data, plot, (6, 3.2))


def keep_distribution(folder: Path, rows: Sequence[Row]) -> None:
    """Sorted kept shares over the layer-head pairs."""
    shares = sorted(r["keep_head"] for r in rows)
    data = [{"rank": i / max(1, len(shares) - 1), "keep_head": share} for i, share in enumerate(shares)]

    def plot(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        left.hist(shares, bins=20, range=(0, 1))
        left.set(xlabel="kept share", ylabel="layer-head pairs")
        right.plot([r["rank"] for r in data], shares)
        right.set(xlabel="share of layer-head pairs", ylabel="kept share at most", ylim=(0, 1))

    draw(folder, "keep_distribution", data, plot, (7, 3))


def gap_histogram(folder: Path, histograms: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Exact row maximum less pseudo-maximum, by rule; to the left of zero the pseudo-maximum is too high."""
    data = []
    for series, histogram in histograms.items():
        edges, counts = histogram["edges"], histogram["counts"]
        total = sum(counts)
        lows, highs = [None, *edges], [*edges, None]
        data += [
            {"series": series, "from_nats": low, "to_nats": high, "observations": count, "share": count / total}
            for low, high, count in zip(lows, highs, counts, strict=True)
            if count
        ]

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        for series in histograms:
            own = [r for r in data if r["series"] == series]
            middle = [_middle(r["from_nats"], r["to_nats"]) for r in own]
            axes.plot(middle, [r["share"] for r in own], drawstyle="steps-mid", label=series)
        axes.axvline(0, color="black", linewidth=0.6)
        axes.set(yscale="log", xlabel="exact maximum less pseudo-maximum, nats", ylabel="share of steps and heads")
        axes.legend(frameon=False)

    draw(folder, "pseudo_max_gap", data, plot, (6, 3.2))


def bytes_by_stage(folder: Path, stages: Mapping[str, float], dense: float) -> None:
    """Bytes read by stage, as shares of what dense attention reads."""
    data = [{"stage": stage, "bytes": size, "share_of_dense": size / dense} for stage, size in stages.items() if dense]

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        left = 0.0
        for row in data:
            axes.barh(0, row["share_of_dense"], left=left, label=row["stage"])
            left += row["share_of_dense"]
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(yticks=[], xlabel="bytes read, share of dense 16-bit attention", xlim=(0, max(1.05, left * 1.05)))
        figure.legend(frameon=False, ncols=len(data), loc="outside upper center")

    draw(folder, "bytes_by_stage", data, plot, (6, 1.8))


def kl_by_position(folder: Path, rows: Sequence[Row]) -> None:
    """KL divergence of the next-token distribution from dense, by position in the continuation."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot([r["position"] for r in rows], [r["kl"] for r in rows], marker=".", linewidth=0.8)
        axes.set(xlabel="position in the continuation", ylabel="KL(dense, method), nats")
        if any(r["kl"] > 0 for r in rows):
            axes.set_yscale("log")

    draw(folder, "kl_by_position", rows, plot, (6, 3))


def against_sparsity(folder: Path, name: str, rows: Sequence[Row], metric: str, label: str, log: bool) -> None:
    """A metric against the share of tokens left out: own selection, and what is loaded for the group."""
    keys = ("label", "rule", "keep_head", "keep_io", "bytes_ratio", metric)
    data = [{key: row[key] for key in keys} for row in rows if row[metric] is not None]

    def plot(figure: Any) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, keep, what in zip(panels, ("keep_head", "keep_io"), ("selected per head", "loaded"), strict=True):
            for rule in dict.fromkeys(r["rule"] for r in data):
                own = sorted((1 - r[keep], r[metric]) for r in data if r["rule"] == rule)
                axes.plot([x for x, _ in own], [y for _, y in own], marker=".", label=rule)
            axes.set(xlabel=f"sparsity: 1 - {what}")
            if log:
                axes.set_yscale("log")
        panels[0].set_ylabel(label)
        panels[0].legend(frameon=False)

    draw(folder, name, data, plot, (8, 3.4))


def margin_map(folder: Path, rows: Sequence[Row]) -> None:
    """Calibrated margin of every layer and query head."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        layers, heads = (sorted({r[key] for r in rows}) for key in ("layer", "head"))
        value = {(r["layer"], r["head"]): r["delta_nats"] for r in rows}
        image = axes.imshow([[value[x, h] for x in layers] for h in heads], aspect="auto", origin="lower", vmax=16)
        axes.set(xlabel="position of the layer", ylabel="query head")
        figure.colorbar(image, ax=axes, label="margin, nats", extend="max")

    draw(folder, "margins", rows, plot, (6, 3.2))


def margin_curves(folder: Path, rows: Sequence[Row]) -> None:
    """Recall and bytes read at each margin, all heads at the same one."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        for key in ("mass_recall", "mass_recall_own", "bytes_ratio"):
            axes.plot([r["margin_nats"] for r in rows], [r[key] for r in rows], marker=".", label=key)
        axes.set(xlabel="margin of every head, nats", xlim=(0, 16), ylim=(0, 1.02))
        axes.legend(frameon=False)

    draw(folder, "margin_curves", rows, plot, (6, 3.2))


def _middle(low: float | None, high: float | None) -> float:
    if low is None or high is None:
        return float(high if low is None else low)  # type: ignore[arg-type]
    return (low + high) / 2


def _mean(values: Iterable[float]) -> float:
    given = list(values)
    return sum(given) / len(given)
