"""What is lost against what it costs: bytes read, the time of a decode step in the same run, the kernel's own time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from analysis.drawing import Figure, Series
from analysis.kernel import comparable, devices
from analysis.labels import distinct_labels
from analysis.load import Run
from analysis.measurements import Timing
from analysis.shapes import is_number
from analysis.unfinished import average

Value = Callable[[Run], float | None]


def pareto(scored: Sequence[Run], quality: Sequence[Run], kernel: Sequence[Timing]) -> list[Figure]:
    """All views.

    Parameters
    ----------
    scored, quality
        Runs whose scores, and runs whose selections are shown.
    kernel
        Rows of the kernel runner. A run has the time of its own method at its own kept share (`kernel_time`).
    """
    timed = [t for t in comparable(kernel) if t.row["B"] == 1]
    figures = []
    for y, y_label, runs, value in (
        ("accuracy", "average score", scored, average),
        ("recall", "mass recall", quality, _figure("fidelity.mass_recall")),
        ("lse", "LSE error, mean, nat", quality, _figure("fidelity.lse_error_mean")),
        ("kl", "KL to dense, nat", quality, _figure("forced.kl_mean")),
    ):
        own, length = _of_length(timed, runs)
        kernel_label = f"us per layer step at {length} tokens, {devices(own)}"
        for x, x_label, cost in (
            ("bytes", "bytes read of dense", _figure("sparsity.bytes_ratio")),
            ("time", "ms per decode step", _step_ms),
            ("kernel", kernel_label, lambda run, own=own: kernel_time(run, own)),
        ):
            figures.append(_cloud(f"pareto_{y}_{x}", x_label, y_label, runs, cost, value))
    return figures


def kernel_time(run: Run, timings: Sequence[Timing]) -> float | None:
    """Microseconds of one layer's step of the run's method at the share of tokens that the run loaded.

    Between two measured shares time is interpolated linearly: it is that of reading bytes. None outside them.
    """
    kept = run.figure("sparsity.keep_io")
    own = [t.row for t in timings if t.row["method"] == run.method["name"]]
    points = sorted((row["kept"], row["time_us"]) for row in own if is_number(row.get("kept")))
    if kept is None or not points:
        return None
    for (low, before), (high, after) in zip(points, [*points[1:], points[-1]], strict=True):
        if low <= kept <= high:
            return float(before + (after - before) * (kept - low) / (high - low)) if high > low else float(before)
    return None


def _of_length(timings: Sequence[Timing], runs: Sequence[Run]) -> tuple[list[Timing], int]:
    """The rows at the one length that is nearest to the runs' own."""
    wanted = max((run.figure("task.length") or 0.0 for run in runs), default=0.0)
    length = min((t.row["T"] for t in timings), key=lambda T: abs(T - wanted), default=0)
    return [t for t in timings if t.row["T"] == length], length


def _figure(path: str) -> Value:
    return lambda run: run.figure(path)


def _step_ms(run: Run) -> float | None:
    rate = run.figure("timing.decode_tok_s")
    return 1000 / rate if rate else None


def _cloud(name: str, x_label: str, y_label: str, runs: Sequence[Run], x: Value, y: Value) -> Figure:
    series = []
    for label, run in zip(distinct_labels([r.method for r in runs]), runs, strict=True):
        fx, fy = x(run), y(run)
        if fx is not None and fy is not None:
            series.append(Series(label, (fx,), (fy,), (run.run_id,)))
    title = f"{y_label} against {x_label}" + (" (random weights)" if any(run.random_weights for run in runs) else "")
    return Figure(name, title, x_label, y_label, tuple(series), "points")
