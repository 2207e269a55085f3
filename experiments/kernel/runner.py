"""``runner=kernel``: a grid of decode steps of one layer as a run that resumes, every row kept as soon as measured."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import experiments.kernel as package
from experiments.bench_config import BenchOptions
from experiments.checks import refusal
from experiments.config import RunConfig
from experiments.environment import device_class, git_revision, versions
from experiments.errors import UsageError
from experiments.kernel import stored, timing
from experiments.kernel.grid import BLOCK, COMPLETING, KEPT, WITH_TAIL, Mode, Point, Shape, point
from experiments.kernel.measure import PointRun
from experiments.kernel.record import line, problem, record
from experiments.kernel.rows import Item, Refusal, Row
from experiments.kernel.session import Session
from experiments.kernel.source import Step, captured
from experiments.kernel.table import print_grid
from experiments.lifecycle import Rows, StudyRun, code_and_machine
from experiments.progress import console
from experiments.refusals import knob_refusal
from experiments.replay import trace_paths
from experiments.tracker import Tracker
from ffd.kernels.launch import INTERPRETED
from ffd.methods import KnobError, create, method_class

_BANDWIDTH = "read bandwidth"
"""Kept as a row too: rows of a resumed run have one roof."""
_BENCH = ("B", "T", "kept", "G", "Hkv", "d", "dtype", "l2", "timing", "stages", "source")
"""Keys of ``bench`` that decide the rows; traces do by their content."""
_NOT_DECIDING = ("__main__", "runner", "table")
"""Modules of this package that rows do not depend on."""


def run_kernel(config: RunConfig) -> int:
    """Run, resume or show one grid; returns the exit code."""
    if not torch.cuda.is_available() and not INTERPRETED:
        raise UsageError("runner=kernel: needs a GPU, and none is visible")
    if INTERPRETED and config.bench.T is None:
        raise UsageError("bench.T=null: expected lengths of a few hundred tokens under TRITON_INTERPRET=1")
    if config.executor == "reference":
        raise UsageError("executor=reference: runner=kernel times fused kernels; expected auto or fused")
    _refuse_engine(config)
    if config.match.target is not None:
        raise UsageError(f"match.{config.match.target}={config.match.value}: runner=kernel has bench.kept for that")
    if config.bench.source == "planted":
        _require_room(config)
        paths: list[Path] = []
    else:
        paths = trace_paths(config.bench.traces, "bench.traces")
    return KernelRun(config, identity(config, paths), paths).run()


def _refuse_engine(config: RunConfig) -> None:
    """Refuse settings of an engine, which one layer has not."""
    for key, neutral in (("graph", "auto"), ("fuse", "auto"), ("prefill_chunk", None)):
        value = getattr(config, key)
        if value != neutral:
            raise refusal(
                f"engine.{key}", value, f"{neutral or 'null'}: runner=kernel times a layer, without an engine"
            )


def _require_room(config: RunConfig) -> None:
    """Refuse lengths and kept fractions that no hot blocks can be planted for."""
    bench = config.bench
    lengths, least = bench.T or WITH_TAIL + COMPLETING, 2 * BLOCK
    if min(lengths) < least:
        raise refusal("bench.T", min(lengths), f"at least {least} tokens with bench.source=planted")
    if bench.kept is not None and min(bench.kept) * max(lengths) < least:
        raise refusal("bench.kept", min(bench.kept), f"at least {least} tokens, which bench.T={max(lengths)} has not")


def identity(config: RunConfig, paths: Sequence[Path]) -> dict[str, Any]:
    """Everything that decides the rows."""
    from eval.data.store import sha256_of

    deciding = [m.name for m in pkgutil.iter_modules(package.__path__) if m.name not in _NOT_DECIDING]
    modules = [f"{package.__name__}.{name}" for name in deciding]
    names = {config.method["name"], "dense"}
    bench = {key: getattr(config.bench, key) for key in _BENCH}
    return {
        "runner": "kernel",
        "method": dict(config.method),
        "task": {"name": "kernel"},
        "seed": config.seed,
        "bench": bench,
        "traces": [sha256_of(path) for path in paths],
        **code_and_machine([*sorted(modules), *sorted({method_class(name).__module__ for name in names})]),
    }


class KernelRun(StudyRun):
    """One method over one grid, dense baselines re-timed beside it."""

    def __init__(self, config: RunConfig, identity: dict[str, Any], paths: Sequence[Path]) -> None:
        super().__init__(config, identity)
        self.paths = paths
        self.device = "cpu" if INTERPRETED else "cuda"

    def finished(self) -> Rows:
        """What was kept; a row with a damaged field is said so and counts as not done."""
        rows = super().finished()
        for label, index in list(rows):
            try:
                found = stored.item(rows[label, index], f"{self.store.samples_path}: {label}")
                if found is not None and found.label != label:
                    raise UsageError(f"{self.store.samples_path}: {label}: has the fields of {found.label}")
            except UsageError as error:
                console.print(f"{error}; counts as not done")
                del rows[label, index]
        return rows

    def plan(self, done: Rows) -> str:
        """Shapes of the grid."""
        timed = f"{sum('time_us' in row for row in done.values())} rows done"
        if self.paths:
            return f"{self.config.method['name']} on {len(self.paths)} traces, {timed}"
        grid = [one.shape.label for one, _ in self.points()]
        return (
            f"{self.config.method['name']} at {len(grid)} shapes, {grid[0]} to {grid[-1]}; {timed} "
            f"(kept fractions of less than {2 * BLOCK} tokens are left out)"
        )

    def points(self) -> Iterator[tuple[Point, list[Step] | None]]:
        """What to time, and the captured steps where keys are not planted."""
        bench, method = self.config.bench, dict(self.config.method)
        methods = {method.pop("name"): method}
        try:
            for path in self.paths:
                for shape, steps in captured(path, self.device):
                    yield point(shape, methods, (None,), modes(bench), bench.stages), steps
            for shape in () if self.paths else shapes(bench):
                yield point(shape, methods, bench.kept or KEPT, modes(bench), bench.stages), None
        except KnobError as error:
            raise UsageError(knob_refusal(error)) from None
        except ValueError as error:
            raise UsageError(str(error)) from None

    def work(self, rows: Rows, tracker: Tracker) -> None:
        """Time what is missing, point by point."""
        session = Session(items(rows))
        bandwidth = self._bandwidth(rows)
        for one, steps in self.points():
            run = PointRun(one, bandwidth, self.device, captured=steps, seed=self.config.seed, session=session)
            for item in run.rows():
                self._keep(rows, item.label, item.as_dict())
                console.print(line(item))
                if isinstance(item, Row):
                    tracker.log({f"time_us/{item.label}": item.time_us, "efficiency": item.efficiency})
            self._overturn(rows, session)

    def _overturn(self, rows: Rows, session: Session) -> None:
        """Replace what an earlier process refused as wrong and this one found right."""
        for label in [label for (label, _), row in rows.items() if row.get("wrong") and label not in session.items]:
            self._keep(rows, label, {"right": True})

    def _bandwidth(self, rows: Rows) -> float:
        if (_BANDWIDTH, 0) not in rows:
            self._keep(rows, _BANDWIDTH, {"bytes_per_us": timing.read_bandwidth(self.device)})
        return float(rows[_BANDWIDTH, 0]["bytes_per_us"])

    def _keep(self, rows: Rows, label: str, values: dict[str, Any]) -> None:
        row = {"task": label, "index": 0, **values}
        self.store.append_sample(row)
        rows[label, 0] = row

    def summarize(self, rows: Rows) -> dict[str, Any]:
        """The record, and why it must not be believed if so."""
        session = Session(items(rows))
        measured, refused = session.rows, session.refused
        bandwidth = float(rows.get((_BANDWIDTH, 0), {}).get("bytes_per_us", 0.0))
        machine = {
            "gpu": device_class(),
            "versions": versions(("torch", "triton")),
            "revision": git_revision()["commit"],
        }
        made = record(measured, refused, bandwidth, machine)
        return {
            "method": dict(self.config.method),
            "task": {"name": "kernel"},
            **made,
            "problem": problem(made),
            "lacking": self._lacking(measured, refused),
        }

    def _lacking(self, measured: Sequence[Row], refused: Sequence[Refusal]) -> str | None:
        """That the method asked for has no time at all, and why."""
        knobs = dict(self.config.method)
        label = create(knobs.pop("name"), knobs).label
        if any(row.method == label for row in measured):
            return None
        reasons = (item.reason for item in refused if item.label.startswith(f"{label} "))
        return f"{label} was not timed: {next(reasons, 'nothing was asked for')}"

    def write_results(self, rows: Rows, summary: dict[str, Any]) -> None:
        """The record in a file of its own, in the form of ``analysis/measurements/kernel-h200.json``."""
        self.store.write_json("kernel.json", {k: v for k, v in summary.items() if k not in _OF_THE_RUN})

    def show(self, summary: dict[str, Any]) -> None:
        """Print rows, slopes and the gate's result."""
        print_grid(summary, f"{self.store.summary_path}: a row")


_OF_THE_RUN = ("run_id", "status", "reason", "runner", "method", "task", "environment")


def items(rows: Rows) -> Iterator[Item]:
    """Rows and refusals among what was kept."""
    for (label, _), row in rows.items():
        if (found := stored.item(row, label)) is not None:
            yield found


def modes(bench: BenchOptions) -> tuple[Mode, ...]:
    """Ways of timing; under the interpreter there is but one."""
    if INTERPRETED:
        return (Mode("interpreted", "hot"),)
    return tuple(Mode(timing, l2) for timing in bench.timing for l2 in bench.l2)


def shapes(bench: BenchOptions) -> Iterator[Shape]:
    """The grid of shapes, short ones first."""
    for dtype in bench.dtype:
        for d in bench.d:
            for group in bench.G:
                for batch in bench.B or (1,):
                    for tokens in sorted(bench.T or WITH_TAIL + COMPLETING):
                        yield Shape(batch, tokens, group * bench.Hkv, bench.Hkv, d, dtype)
