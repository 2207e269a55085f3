"""``runner=calibrate``: margins per layer or head that meet a target, found on some prompts and checked on others."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from eval.fidelity import write_table
from eval.fidelity.aggregate import distribution
from eval.fidelity.curves import Curves, enough_for_all, invert, margin_curves
from eval.fidelity.traces import Trace
from experiments import figures
from experiments.checks import written
from experiments.config import RunConfig
from experiments.engines import make_method
from experiments.errors import UsageError
from experiments.lifecycle import Rows, StudyRun, code_and_machine
from experiments.margins import at_margin, calibrated_method, curve_table, reached
from experiments.progress import console
from experiments.recording import record_traces
from experiments.replay import load_traces
from experiments.table import number, results
from experiments.tracker import Tracker
from experiments.workload import Item, Workload, for_calibration, load_workload
from ffd.methods import Method, method_class

RESULT = "calibration"
"""Task of the row that holds the result."""
_COSTS = ("keep_head", "keep_io", "bytes_ratio")
_FEW_STEPS = 16
"""Fewer say little of a head."""
_NOT_REPEATED = ("name", "delta", "deltas", "delta_unit")
"""Of a method: the margins found are in its place, and in nats."""


def run_calibrate(config: RunConfig) -> int:
    """Run, resume or show one calibration; returns the exit code."""
    if "deltas" not in {field.name for field in fields(method_class(config.method["name"]))}:
        raise UsageError(f"method={config.method['name']}: has no margins per head to calibrate (knob deltas)")
    workload = load_workload(for_calibration(config))
    identity = {
        **config.resolved(),
        "task": workload.task,
        "calibrate": vars(config.calibrate),
        "model_revision": workload.model.revision,
        "prompts": workload.fingerprint,
        "executor": workload.executor,
        **code_and_machine(["ffd.teacher", method_class(config.method["name"]).__module__, "eval.fidelity.curves"]),
    }
    return CalibrateRun(config, identity, workload).run()


class CalibrateRun(StudyRun):
    """One calibration."""

    def __init__(self, config: RunConfig, identity: dict[str, Any], workload: Workload) -> None:
        super().__init__(config, identity)
        self.workload = workload
        self.fitted, self.held_out = split(workload.items, config.calibrate.holdout)
        self.traces = self.store.folder / "traces"

    def plan(self, done: Rows) -> str:
        """Prompts and target."""
        c = self.config.calibrate
        return (
            f"{c.target} {c.value} per {c.per} on {len(self.fitted)} prompts, checked on {len(self.held_out)} others; "
            f"{sum(key[0] != RESULT for key in done)} recorded"
        )

    def work(self, rows: Rows, tracker: Tracker) -> None:
        """Record what is missing, then fit and check."""
        items = [*self.fitted, *self.held_out]
        pending = [item for item in items if (item.task, item.index) not in rows]
        if pending:
            for item, _, steps in record_traces(self.config, self.workload, self.workload.load(), pending, self.traces):
                self._keep(rows, {"task": item.task, "index": item.index, "steps": steps})
                console.print(f"recorded {item.task} {item.index}: {steps} steps")
        if (RESULT, 0) not in rows:
            started = time.perf_counter()
            row = self._fit(rows)
            self._keep(rows, {"task": RESULT, "index": 0, **row, "seconds": time.perf_counter() - started})
            held_out = row["held_out"]  # None where no prompt is, or none of those has a step
            tracker.log({"calibrated": row["calibrated"]["reached"], "held_out": held_out and held_out["reached"]})

    def _keep(self, rows: Rows, row: dict[str, Any]) -> None:
        self.store.append_sample(row)
        rows[row["task"], row["index"]] = row

    def _load(self, rows: Rows, items: Sequence[Item]) -> list[Trace]:
        recorded = [item for item in items if rows[item.task, item.index]["steps"]]
        return load_traces([self.traces / f"{item.task}-{item.index}.safetensors" for item in recorded])

    def _fit(self, rows: Rows) -> dict[str, Any]:
        c, executor = self.config.calibrate, self.config.executor
        fitted, held_out = self._load(rows, self.fitted), self._load(rows, self.held_out)
        if not fitted:
            raise UsageError(f"task.samples={len(self.fitted)}: no calibration prompt has an answer of two tokens")
        steps = sum(len(trace.lengths) for trace in fitted)
        if steps < _FEW_STEPS:
            console.print(f"margins rest on {steps} recorded steps; a smaller fidelity.every or more prompts give more")
        curves = margin_curves(fitted, make_method(self.config.method), executor=executor)
        found, uniform = (invert(curves, c.target, c.value, per) for per in (c.per, "global"))
        enough = enough_for_all(curves, c.target, c.value)
        measured = {}
        for name, margins in (("calibrated", found), ("uniform", uniform)):
            method = self._with(curves, margins)
            for part, traces in ((name, fitted), (f"{name}_held_out", held_out)):
                measured[part] = reached(method, traces, c.target, c.per, c.value, executor)
        return {
            "layers": list(curves.layers),
            "deltas": found.tolist(),
            "uniform_delta": float(uniform[0, 0]),
            "uniform_for_all": None if enough is None else at_margin(curves, enough),
            "calibrated": measured["calibrated"],
            "held_out": measured["calibrated_held_out"],
            "uniform": measured["uniform"],
            "uniform_held_out": measured["uniform_held_out"],
            "curves": curve_table(curves),
        }

    def _with(self, curves: Curves, margins: Tensor) -> Method:
        return make_method(calibrated_method(self.config.method, curves.layers, margins.tolist()))

    def summarize(self, rows: Rows) -> dict[str, Any]:
        """Target, what was reached where, and the uniform margin that meets the same target."""
        row = rows.get((RESULT, 0), {})
        keys = ("calibrated", "held_out", "uniform", "uniform_held_out", "uniform_delta", "uniform_for_all")
        result = {key: row.get(key) for key in keys}
        pairs = torch.tensor(row["deltas"], dtype=torch.float64) if row else torch.empty(0, dtype=torch.float64)
        return {
            "trajectory": "dense",
            "method": dict(self.config.method),
            "model": {"name": self.workload.model.label, "revision": self.workload.model.revision},
            "task": self.workload.task,
            "calibrate": dict(vars(self.config.calibrate)),
            "prompts": {
                "calibration": len(self.fitted),
                "held_out": len(self.held_out),
                "seed": for_calibration(self.config).seed,
            },
            "counted": "recorded steps of all full-attention layers",
            **result,
            "deltas_nats": distribution(pairs),
        }

    def write_results(self, rows: Rows, summary: dict[str, Any]) -> None:
        """The method's configuration, and curves and margins as tables and figures."""
        import yaml

        row = rows[RESULT, 0]
        method = calibrated_method(self.config.method, row["layers"], row["deltas"])
        self.store.write_text("method.yaml", yaml.safe_dump(method, sort_keys=False, default_flow_style=None))
        margins = [
            {"layer": layer, "head": head, "delta_nats": delta}
            for layer, own in zip(row["layers"], row["deltas"], strict=True)
            for head, delta in enumerate(own)
        ]
        write_table(self.store.folder / "deltas.csv", margins)
        figures.margin_map(self.store.folder / "figures", margins)
        figures.margin_curves(self.store.folder / "figures", row["curves"])

    def show(self, summary: dict[str, Any]) -> None:
        """Print what was reached."""
        c = summary["calibrate"]
        out = Table(title=f"calibration · {summary['model']['name']} · {c['target']} {c['value']} per {c['per']}")
        for name in ("margins", "prompts"):
            out.add_column(name)
        for name in (c["target"], "pairs that meet it", "worst pair", *_COSTS):
            out.add_column(name, justify="right")
        for margins, prompts, key in (
            (f"per {c['per']}", "calibration", "calibrated"),
            (f"per {c['per']}", "held out", "held_out"),
            (f"one: {summary['uniform_delta']:g} nats", "calibration", "uniform"),
            (f"one: {summary['uniform_delta']:g} nats", "held out", "uniform_held_out"),
        ):
            row = summary[key]
            if row is not None:
                worst = row["pairs"]["min" if c["target"] == "mass_recall" else "max"]
                numbers = (row["reached"], row["pairs_meeting"], worst, *(row[cost] for cost in _COSTS))
                out.add_row(margins, prompts, *(number(x, 4) for x in numbers))
        results().print(out)
        enough = summary["uniform_for_all"]
        if enough is not None:
            results().print(
                f"one margin that is enough for every pair: {enough['margin_nats']:g} nats, "
                f"mass recall {number(enough['mass_recall'], 4)}, bytes {number(enough['bytes_ratio'], 4)}"
            )
        knobs = [f"method.{knob}={written(value)}" for knob, value in self._changed_knobs().items()]
        given = " ".join([f"method={self.config.method['name']}", *knobs])
        results().print(f"run with: python run.py {given} method.deltas={self.store.folder / 'method.yaml'}")

    def _changed_knobs(self) -> dict[str, Any]:
        """What a run with these margins must be given too: knobs that are not the method's defaults."""
        method = self.config.method
        defaults = method_class(method["name"])()
        found = {knob: value for knob, value in method.items() if knob not in _NOT_REPEATED}
        return {knob: value for knob, value in found.items() if value != getattr(defaults, knob)}


def split(items: Sequence[Item], holdout: float) -> tuple[list[Item], list[Item]]:
    """Prompts to fit on and prompts to check on: the last ``holdout`` share of each task, never all of them."""
    by_task: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_task[item.task].append(item)
    fitted: list[Item] = []
    held_out: list[Item] = []
    for own in by_task.values():
        count = min(len(own) - 1, math.ceil(len(own) * holdout))
        fitted += own[: len(own) - count]
        held_out += own[len(own) - count :]
    return fitted, held_out
