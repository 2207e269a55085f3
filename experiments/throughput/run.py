"""``runner=throughput``: the cases of a grid under the run store, each row kept as soon as it is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from experiments.config import RunConfig
from experiments.engines import make_method, prefill_chunk
from experiments.errors import UsageError
from experiments.lifecycle import Rows, StudyRun, code_and_machine
from experiments.progress import console
from experiments.refusals import refusals
from experiments.table import number, results
from experiments.throughput.cases import (
    CPU_POINTS,
    DEFAULT_KEPT,
    DEFAULT_POINTS,
    DEFAULT_TRANSFORMERS_POINTS,
    FAIR,
    Case,
    Grid,
    cases,
)
from experiments.throughput.subject import Subject, subject
from experiments.throughput.summary import break_even, line
from experiments.tracker import Tracker

_KEYS = ("task", "index")


def run_throughput(config: RunConfig) -> int:
    """Run, resume or show one record; returns the exit code."""
    import torch

    from experiments.settings import executor_here
    from experiments.throughput.demanded import require_fusable

    gpu = torch.cuda.is_available()
    chosen = subject(config, gpu)
    method = make_method(config.method)
    asked = grid(config, gpu)
    planned = tuple(cases(asked, [method]))
    if not planned:
        raise UsageError(f"bench.protocols={','.join(config.bench.protocols)}: expected {FAIR} too, without a GPU")
    with refusals():
        executor_here(config)
        require_fusable(planned, "cuda" if gpu else "cpu", chosen.dtype)
    identity = {
        "runner": "throughput",
        "method": dict(config.method),
        "model": {**dict(config.model), "name": chosen.name, "dtype": chosen.dtype},
        "model_revision": chosen.revision,
        "task": {"name": "throughput"},
        "points": [list(point) for point in asked.points],
        "cases": [f"{case.label} {'prefill' * case.prefill} {'ablation' * case.ablation}" for case in planned],
        "executor": config.executor,
        "engine": {"graph": config.graph, "prefill_chunk": config.prefill_chunk},
        **code_and_machine(
            ["ffd.engine", type(method).__module__, *(f"experiments.throughput.{part}" for part in _MEASURING)]
        ),
    }
    notes = []
    if set(config.bench.protocols) - set(asked.protocols):
        notes.append("no GPU: the fair protocol alone is timed, and a CPU's times say nothing about a GPU's")
    if config.bench.kept is not None and not method.margins_per_head and not method.reads_everything:
        notes.append(f"bench.kept: {method.name} has no margins per head; its own knobs decide what is kept")
    return ThroughputRun(config, identity, chosen, planned, notes).run()


_MEASURING = ("bench", "cases", "engine_row", "margins", "measure", "steps", "transformers_row")
"""Modules whose change makes another measurement."""


def grid(config: RunConfig, gpu: bool) -> Grid:
    """What ``bench.*`` and ``engine.fuse`` ask for on this machine."""
    bench = config.bench
    default = bench.B is None and bench.T is None
    points: tuple[tuple[int, int], ...] = DEFAULT_POINTS if gpu else CPU_POINTS
    if not default:
        points = tuple((b, t) for b in bench.B or (1,) for t in bench.T or sorted({t for _, t in DEFAULT_POINTS}))
    return Grid(
        points=points,
        kept=bench.kept or DEFAULT_KEPT,
        protocols=tuple(p for p in bench.protocols if gpu or p == FAIR),
        fuse=tuple(str(value).lower() for value in config.fuses),
        prefill_tokens=bench.prefill_tokens,
        transformers_points=DEFAULT_TRANSFORMERS_POINTS if default else None,
    )


class ThroughputRun(StudyRun):
    """One record."""

    def __init__(
        self,
        config: RunConfig,
        identity: dict[str, Any],
        chosen: Subject,
        planned: Sequence[Case],
        notes: Sequence[str],
    ) -> None:
        super().__init__(config, identity)
        self.subject = chosen
        self.notes = notes
        points = list(dict.fromkeys((case.B, case.T) for case in planned))
        self.cases = {(case.name, points.index((case.B, case.T))): case for case in planned}
        """By the key of their row in ``samples.jsonl``."""

    def plan(self, done: Rows) -> str:
        """Rows to measure."""
        head = f"{self.subject.name}: {len(self.cases)} rows, {sum(key in done for key in self.cases)} measured"
        return "\n".join([*self.notes, head])

    def work(self, rows: Rows, tracker: Tracker) -> None:
        """Measure what is missing."""
        pending = {key: case for key, case in self.cases.items() if key not in rows}
        if not pending:
            return
        from experiments.environment import device_class
        from experiments.kernel.timing import read_bandwidth
        from experiments.throughput.bench import Bench
        from experiments.throughput.demanded import require_fused
        from experiments.throughput.measure import measure

        model = self.subject.load("cuda" if device_class() != "cpu" else "cpu")
        chunk = prefill_chunk(self.config.prefill_chunk, model.device.type)
        bandwidth = 1e6 * read_bandwidth(model.device.type)
        bench = Bench(model, device_class(), bandwidth, self.config.executor, self.config.graph, chunk)
        require_fused(pending.values(), bench)
        started = time.perf_counter()
        for (task, index), measured in zip(pending, measure(bench, pending.values()), strict=True):
            seconds = time.perf_counter() - started
            row = {"task": task, "index": index, **measured, "read_bandwidth": bandwidth, "seconds": seconds}
            self.store.append_sample(row)
            rows[task, index] = row
            tracker.log({key: row[key] for key in ("ms_per_step", "tokens_per_second", "kept") if key in row})
            console.print(f"[{len(rows)}/{len(self.cases)}] {line(row)}")
            started = time.perf_counter()

    def summarize(self, rows: Rows) -> dict[str, Any]:
        """All rows and the break-even points between them."""
        ordered = [{k: v for k, v in rows[key].items() if k not in _KEYS} for key in self.cases if key in rows]
        return {
            "method": dict(self.config.method),
            "model": {"name": self.subject.name, "revision": self.subject.revision, "dtype": self.subject.dtype},
            "task": {"name": "throughput"},
            "notes": list(self.notes),
            "rows": ordered,
            "break_even": break_even(ordered),
        }

    def write_results(self, rows: Rows, summary: dict[str, Any]) -> None:
        """Nothing beside the summary: `python -m analysis tables` makes tables of its rows."""

    def show(self, summary: dict[str, Any]) -> None:
        """Print rows and break-even points."""
        out = Table(title=f"throughput · {summary['model']['name']} · {summary['environment']['device']}")
        for name in ("protocol", "method"):
            out.add_column(name, no_wrap=True)
        for name in ("B", "T", "kept", "ms/step", "tok/s", "x floor", "KV bytes/token", "peak GB"):
            out.add_column(name, justify="right")
        for row in (r for r in summary["rows"] if "problem" not in r):
            peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 1e9
            point = (row["protocol"], row["method"], str(row["B"]), str(row["T"]))
            figures = ((row["kept"], 3), (row["ms_per_step"], 2), (row["tokens_per_second"], 1), (row["over_floor"], 2))
            out.add_row(*point, *(number(*f) for f in (*figures, (row["kv_bytes_per_token"], 0), (peak, 1))))
        results().print(out)
        extra = ("problem", "prefill_ms", "graph_ablation")
        for row in (r for r in summary["rows"] if any(r.get(key) is not None for key in extra)):
            results().print(line(row))
        for found in summary["break_even"]:
            results().print(found["says"])
        for note in summary["notes"]:
            results().print(f"note: {note}")
