"""``runner=fidelity trace=replay``: sweep methods and knobs over recorded traces, without the model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from eval.fidelity import FidelityState, aggregate, broken_metric, histogram, table, write_table
from eval.fidelity import summary as headline
from eval.fidelity.replay import replay_with_ledger
from eval.fidelity.traces import Trace
from experiments import figures
from experiments.config import RunConfig
from experiments.engines import make_method
from experiments.errors import UsageError
from experiments.fidelity_table import print_broken
from experiments.laws import laws_of_a_sweep, problem
from experiments.lifecycle import Rows, StudyRun, code_and_machine
from experiments.options import Point
from experiments.progress import console
from experiments.table import number, results, status_line
from experiments.tracker import Tracker
from ffd.methods import method_class
from ffd.report import LayerReport

SPEARMAN_UNIT = 16
"""Tokens per page of the page-level correlation, the same for all points."""


def run_replay(config: RunConfig) -> int:
    """Run, resume or show one sweep; returns the exit code."""
    from eval.data.store import sha256_of

    paths = trace_paths(config.fidelity.traces)
    if not config.fidelity.sweep:
        raise UsageError("fidelity.sweep={}: expected at least one method to replay")
    identity = {
        "runner": "fidelity",
        "method": {"name": "sweep"},
        "task": {"name": "replay"},
        "points": [dict(point.method) for point in config.fidelity.sweep],
        "series": [point.series for point in config.fidelity.sweep],
        "traces": [sha256_of(path) for path in paths],
        "executor": config.executor,
        **code_and_machine(
            ["eval.fidelity.replay", *{method_class(p.method["name"]).__module__ for p in config.fidelity.sweep}]
        ),
    }
    return ReplayRun(config, identity, paths).run()


class ReplayRun(StudyRun):
    """One sweep over one set of traces."""

    def __init__(self, config: RunConfig, identity: dict[str, Any], paths: Sequence[Path]) -> None:
        super().__init__(config, identity)
        self.paths = paths
        self.points = config.fidelity.sweep

    @property
    def methods(self) -> Sequence[str]:
        """Those of the points."""
        return [point.method["name"] for point in self.points]

    def plan(self, done: Rows) -> str:
        """Points and traces."""
        return f"{len(self.points)} points over {len(self.paths)} traces, {len(done)} done"

    def work(self, rows: Rows, tracker: Tracker) -> None:
        """Replay every pending point over all traces."""
        pending = [(i, point) for i, point in enumerate(self.points) if (point.series, i) not in rows]
        if not pending:
            return
        traces = load_traces(self.paths)
        for index, point in pending:
            started = time.perf_counter()
            row = {"task": point.series, "index": index, **replayed(point, traces, self.config.executor)}
            row["seconds"] = time.perf_counter() - started
            self.store.append_sample(row)
            rows[point.series, index] = row
            tracker.log({key: row[key] for key in ("keep_head", "keep_io", "mass_recall", "lse_error_mean")})
            console.print(
                f"[{len(rows)}/{len(self.points)}] {point.label}: kept {number(row['keep_io'], 4)}, "
                f"recall {number(row['mass_recall'], 4)}, {row['seconds']:.1f} s"
            )

    def summarize(self, rows: Rows) -> dict[str, Any]:
        """All points and the laws between them."""
        ordered = self._ordered(rows)
        laws = laws_of_a_sweep(ordered)
        return {
            "problem": problem(laws),
            "trajectory": "dense, from traces",
            "method": {"name": "sweep"},
            "task": {"name": "replay"},
            "traces": [trace_note(path) for path in self.paths],
            "counted": "recorded steps of recorded layers, all of them sparse whatever skip_layers says",
            "points": [{k: v for k, v in row.items() if k not in _BULKY} for row in ordered],
            "laws": [law.as_dict() for law in laws],
            "laws_broken": sum(not law.holds for law in laws),
        }

    def write_results(self, rows: Rows, summary: dict[str, Any]) -> None:
        """The table of points, fidelity by head, and the figures."""
        ordered = self._ordered(rows)
        folder = self.store.folder
        write_table(folder / "points.csv", [{k: v for k, v in r.items() if k not in _BULKY} for r in ordered])
        by_head = [{"label": row["label"], **entry} for row in ordered for entry in row["by_head"]]
        write_table(folder / "fidelity.csv", by_head)
        drawn = folder / "figures"
        figures.against_sparsity(drawn, "recall_vs_sparsity", ordered, "mass_recall", "mass recall", log=False)
        figures.against_sparsity(drawn, "lse_vs_sparsity", ordered, "lse_error_mean", "lse error, mean, nats", log=True)
        figures.gap_histogram(drawn, gap_by_rule(ordered))

    def show(self, summary: dict[str, Any]) -> None:
        """Print the points, and the laws that are broken beside them."""
        out = Table(title="replay: points of the sweep")
        out.add_column("point", no_wrap=True)
        for name in ("keep_head", "keep_io", "bytes", "mass recall", "lse mean", "lse max", "Spearman", "gap min"):
            out.add_column(name, justify="right")
        for row in summary["points"]:
            keys = ("keep_head", "keep_io", "bytes_ratio", "mass_recall", "lse_error_mean", "lse_error_max", "spearman")
            values = [number(row[key], 4) for key in keys]
            out.add_row(row["label"], *values, number(row["pseudo_max_gap_min"], 2))
        results().print(out)
        print_broken(summary["laws"])
        results().print(f"counted: {summary['counted']}")
        results().print(status_line(summary))

    def _ordered(self, rows: Rows) -> list[dict[str, Any]]:
        keys = [(point.series, i) for i, point in enumerate(self.points)]
        return [rows[key] for key in keys if key in rows]


_BULKY = ("by_head", "gap_histogram", "task", "index")


def replayed(point: Point, traces: Sequence[Trace], executor: str) -> dict[str, Any]:
    """What one point measures over all traces: one line of ``samples.jsonl``."""
    method = make_method(point.method)
    state, reports, broken = FidelityState(SPEARMAN_UNIT), [], None
    for trace in traces:
        observed, layers = replay_with_ledger(trace, method, SPEARMAN_UNIT, executor)
        broken = broken or broken_metric(observed, (*_OF_SCORES, *_OF_OUTPUTS) if trace.values else _OF_SCORES)
        state = state.merge(observed)
        reports.extend(layers)
    metrics, values = aggregate(state), headline(state)
    values.pop("null_reasons")
    gaps = histogram(state, "pseudo_max_gap")
    keep = table(state)
    return {
        "label": point.label,
        "series": point.series,
        "rule": point.rule,
        "method": dict(point.method),
        "broken": broken,
        "keep_head": metrics["keep_head"]["macro"],
        "keep_io": metrics["keep_io"]["macro"],
        "bytes_ratio": bytes_ratio(reports),
        "pseudo_max_gap_min": metrics["pseudo_max_gap"]["min"],
        **values,
        "gap_histogram": gaps if sum(gaps["counts"]) else None,
        "by_head": [{key: row[key] for key in _BY_HEAD} for row in keep],
    }


_OF_SCORES, _OF_OUTPUTS = ("mass_recall", "lse_error"), ("output_rel_error",)
"""What every observation of a sound method has a value of; of outputs, where a trace has values."""
_BY_HEAD = ("layer", "head", "steps", "keep_head", "keep_io", "mass_recall", "lse_error", "spearman", "pseudo_max_gap")


def bytes_ratio(reports: Sequence[LayerReport]) -> float | None:
    """Bytes read over those of dense attention."""
    dense = sum(report.dense_bytes for report in reports)
    return sum(sum(report.bytes_read.values()) for report in reports) / dense if dense else None


def gap_by_rule(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Histogram of the pseudo-maximum's gap for each rule; it does not depend on the knob that is swept."""
    found: dict[str, Any] = {}
    for row in rows:
        if row["gap_histogram"] is not None:
            found.setdefault(row["rule"], row["gap_histogram"])
    return found


def trace_paths(path: Path | None, key: str = "fidelity.traces") -> list[Path]:
    """The trace files that a configuration names under ``key``; raises `UsageError`."""
    if path is None:
        raise UsageError(f"{key}=null: expected a trace file, or a folder of them, with trace=replay")
    inside = path.rglob("*.safetensors") if path.is_dir() else [path] if path.is_file() else []
    found = sorted(p for p in inside if p.parent.name != "fidelity")  # where a run keeps its sums
    if not found:
        raise UsageError(f"{key}={path}: expected a trace file, or a folder of them, by trace=record")
    return found


def load_traces(paths: Sequence[Path]) -> list[Trace]:
    """Read traces onto the device that decodes; raises `UsageError`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return [Trace.load(path, device) for path in paths]
    except ValueError as error:
        raise UsageError(f"fidelity.traces: {error}") from None


def trace_note(path: Path) -> str:
    """What a trace says of itself."""
    import json

    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return str(json.loads((file.metadata() or {}).get("trace", "{}")).get("note", ""))
    except SafetensorError:
        return "damaged"
