"""Check the paper's bound on the scan's error against recorded queries and keys.

    python -m experiments.theory outputs/runs/<run id>/traces --out figures

writes ``exceedance_by_margin`` and ``exceedance_by_channels``, each as CSV and SVG.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from eval.fidelity.noise import ScanNoise, exceedance_by_channels, exceedance_by_margin, scan_noise
from eval.fidelity.traces import Trace
from experiments.errors import USAGE_EXIT, UsageError, one_line
from experiments.figures import draw
from experiments.replay import load_traces, trace_paths
from ffd.quantization import LEVELS

MARGINS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 15.0, 20.0)
"""Nats."""
_LINES = {
    "observed_first_token": "observed, first token",
    "observed_other_tokens": "observed, other tokens",
    "bound_measured": "bound, measured noise",
    "bound_range": "bound, range of the noise",
}


def check(
    traces: Sequence[Trace], out: Path, *, block_size: int, levels: Any, centre: bool, margin: float
) -> dict[str, list[dict[str, float]]]:
    """Compute both tables and write them with their figures.

    Parameters
    ----------
    traces
        Recorded queries and keys.
    out
        Folder of the four files.
    block_size, levels, centre
        FFD's storage.
    margin
        Nats with all channels, for the table by number of channels.

    Raises
    ------
    UsageError
        If no trace holds a complete block.
    """
    if not any(int(trace.lengths.max()) >= block_size for trace in traces):
        raise UsageError(f"block_size={block_size}: expected at most the traces' {_longest(traces)} tokens")

    def found() -> Iterator[ScanNoise]:
        for trace in traces:
            yield from scan_noise(trace.to("cpu"), block_size=block_size, levels=levels, centre=centre)

    d = next(iter(traces[0].keys.values())).shape[-1]
    counts = sorted({max(1, d * part // 16) for part in (1, 2, 3, 4, 6, 8, 10, 12, 14, 16)})
    tables = {
        "exceedance_by_margin": exceedance_by_margin(found(), MARGINS),
        "exceedance_by_channels": exceedance_by_channels(found(), counts, margin),
    }
    _plot(out, tables["exceedance_by_margin"], "exceedance_by_margin", "margin_nats", "margin, nats")
    label = f"channels (margin {margin:g} nats times their share)"
    _plot(out, tables["exceedance_by_channels"], "exceedance_by_channels", "channels", label)
    return tables


def _plot(out: Path, rows: Sequence[dict[str, float]], name: str, x: str, label: str) -> None:
    def plot(figure: Any) -> None:
        axes = figure.subplots()
        for key, text in _LINES.items():
            shown = [(row[x], row[key]) for row in rows if row[key] > 0]
            style = "--" if key.startswith("bound") else "-"
            axes.plot([a for a, _ in shown], [b for _, b in shown], style, marker=".", label=text)
        axes.set(yscale="log", xlabel=label, ylabel="P(|scan error| > margin)")
        axes.legend(frameon=False)

    draw(out, name, rows, plot, (6, 3.6))


def _longest(traces: Sequence[Trace]) -> int:
    return max(int(trace.lengths.max()) for trace in traces)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.theory", description=__doc__.split("\n")[0])
    parser.add_argument("traces", type=Path, help="trace file, or folder of them (runner=fidelity trace=record)")
    parser.add_argument("--out", type=Path, required=True, help="folder of tables and figures")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--levels", choices=LEVELS, default="edge")
    parser.add_argument("--centre", action="store_true", help="subtract the prompt's mean key")
    parser.add_argument("--margin", type=float, default=5.0, help="nats with all channels (default 5)")
    args = parser.parse_args(arguments)
    try:
        with torch.inference_mode():
            tables = check(
                load_traces(trace_paths(args.traces)),
                args.out,
                block_size=args.block_size,
                levels=args.levels,
                centre=args.centre,
                margin=args.margin,
            )
    except UsageError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return USAGE_EXIT
    for name, rows in tables.items():
        print(f"{args.out / name}.csv")
        print("  ".join(f"{key:>22}" for key in rows[0]))
        for row in rows:
            print("  ".join(f"{value:22.6g}" for value in row.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
