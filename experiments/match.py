"""Matched comparison: the value of a method's knob at which it measures the cost that was asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from eval.fidelity.replay import replay_steps
from eval.fidelity.traces import Trace
from experiments.config import RunConfig
from experiments.errors import UsageError
from experiments.files import read_json, write_atomically
from experiments.identity import digest
from experiments.lifecycle import code_and_machine
from experiments.progress import console
from experiments.recording import record_traces
from experiments.replay import load_traces
from experiments.trajectory import make_method
from experiments.workload import Workload, load_workload
from ffd.methods import Method, SearchKnob, method_class
from ffd.report import layer_report

CLOSE = 0.005
"""A cost this near the target ends the search."""
MOST_TRIALS = 20
CALIBRATION_SEED_OFFSET = 1
"""Generated prompts of calibration differ from those that are measured by their seed."""


def matched(config: RunConfig) -> RunConfig:
    """The configuration with the method's knob replaced so that it meets ``match``.

    Methods that read everything (dense, kivi) are left as they are: the rows that a matched table is read against.

    Parameters
    ----------
    config
        ``match.target`` is set.

    Raises
    ------
    UsageError
        If the method has no knob to search along.
    """
    knob = method_class(config.method["name"]).search_knob
    target = f"match.{config.match.target}={config.match.value}"
    if knob is None:
        if method_class(config.method["name"]).reads_everything:
            console.print(f"{target}: method {config.method['name']} reads everything and is left as it is")
            return replace(config, match=replace(config.match, target=None))
        raise UsageError(f"{target}: method {config.method['name']} has no knob that changes what it reads")
    found = _remembered(config, knob)
    reached = found["cost"]
    prompts = f"{found['prompts']} calibration prompts"
    line = f"{target}: {knob.name}={found['value']:.6g} measures {reached:.4f} on {prompts}"
    if abs(reached - config.match.value) > 2 * CLOSE:
        line += "; the knob comes no nearer"
    console.print(line)
    method = {**config.method, knob.name: found["value"]}
    return replace(config, method=method, match=replace(config.match, target=None))


def search(cost: Callable[[float], float], knob: SearchKnob, target: float, longest: int) -> tuple[float, float]:
    """Bisect a knob whose cost never falls.

    Parameters
    ----------
    cost
        Measures a value of the knob.
    knob
        What is searched.
    target
        Cost to reach.
    longest
        Tokens of the longest context: the upper end of knobs counted in tokens.

    Returns
    -------
    value, cost
        The value tried whose cost is nearest.
    """
    whole = isinstance(knob.low, int)
    low, high = knob.low, longest if math.isinf(knob.high) else knob.high
    tried: dict[float, float] = {}

    def measure(value: float) -> float:
        if value not in tried:
            tried[value] = cost(value)
        return tried[value]

    for end in (low, high):
        measure(end)
    while len(tried) < MOST_TRIALS and min(abs(c - target) for c in tried.values()) > CLOSE:
        middle = (low + high) // 2 if whole else (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if measure(middle) < target else (low, middle)
    best = min(tried, key=lambda value: (abs(tried[value] - target), value))
    return best, tried[best]


@torch.inference_mode()
def replay_cost(traces: Sequence[Trace], method: Method, target: str, num_layers: int, executor: str) -> float:
    """What a method loads (``keep_io``) or reads (``bytes_ratio``) of dense's, over all layers.

    Leading layers that the method leaves dense count as 1, as they do in a run's own figures.
    """
    part = whole = 0.0
    for trace in traces:
        for layer, steps in groupby(replay_steps(trace, method, executor), key=lambda step: step.layer):
            if layer < method.dense_layers:
                continue
            for step in steps:
                step.storage.decode(step.q, trace.scale)
            report = layer_report(layer, True, step.storage)
            own = sum(report.union) / len(report.union) if target == "keep_io" else sum(report.bytes_read.values())
            part += own
            whole += report.context if target == "keep_io" else report.dense_bytes
    sparse = num_layers - min(method.dense_layers, num_layers)
    ratio = part / whole if whole else 1.0
    return (ratio * sparse + (num_layers - sparse)) / num_layers


def _remembered(config: RunConfig, knob: SearchKnob) -> dict[str, Any]:
    """Search once per method, model, prompts and code; the result is kept beside the runs."""
    workload = load_workload(_calibration(config))
    method = {k: v for k, v in config.method.items() if k != knob.name}
    parts = {
        "model": workload.model.revision,
        "prompts": workload.fingerprint,
        "every": config.fidelity.every,
        "executor": workload.executor,
    }
    identity = {
        **parts,
        "method": method,
        "target": [config.match.target, config.match.value],
        **code_and_machine([method_class(config.method["name"]).__module__, "eval.fidelity.replay"]),
    }
    folder = config.root / "match"
    path = folder / f"{config.method['name'].rpartition(':')[2]}-{digest(identity)[:16]}.json"
    stored = read_json(path)
    if stored is not None:
        return dict(stored)
    traces = _traces(config, workload, folder / "traces" / digest(parts)[:16])
    layers = workload.model.config.get_text_config(decoder=True).num_hidden_layers
    assert config.match.target is not None
    target = config.match.target

    def cost(value: float) -> float:
        return replay_cost(traces, make_method({**method, knob.name: value}), target, layers, config.executor)

    value, reached = search(cost, knob, config.match.value, max(int(t.lengths.max()) for t in traces))
    found = {"value": value, "cost": reached, "prompts": len(traces), "method": method, "target": identity["target"]}

    write_atomically(path, json.dumps(found, indent=2).encode() + b"\n")
    return found


def _calibration(config: RunConfig) -> RunConfig:
    task = {**config.task, "samples": config.match.samples} if "samples" in config.task else config.task
    return replace(config, task=task, seed=config.seed + CALIBRATION_SEED_OFFSET, shard=None)


def _traces(config: RunConfig, workload: Workload, folder: Path) -> list[Trace]:
    """Traces of the calibration prompts, recorded once for all methods that are matched on them."""
    done = folder / "complete"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for _ in record_traces(config, workload, workload.load(), workload.items, folder):
            pass
        done.touch()
    return load_traces(sorted(folder.glob("*.safetensors")))
