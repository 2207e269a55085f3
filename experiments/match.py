"""Matched comparison: the value of a method's knob at which it measures the cost that was asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from eval.fidelity.replay import replay_steps
from eval.fidelity.traces import Trace
from experiments.config import RunConfig
from experiments.engines import make_method
from experiments.errors import RunFailedError, UsageError
from experiments.failures import method_failure
from experiments.files import clear_leftovers, held, read_json, write_atomically
from experiments.identity import digest
from experiments.lifecycle import code_and_machine
from experiments.progress import console
from experiments.recording import record_traces
from experiments.refusals import refusals
from experiments.replay import load_traces
from experiments.workload import Workload, for_calibration, load_workload
from ffd.methods import Method, SearchKnob, method_class
from ffd.report import layer_report

CLOSE = 0.005
"""A cost this near the target ends the search."""
TOLERANCE = 0.01
"""A cost farther from the target does not meet it."""
MOST_TRIALS = 20


@dataclass(frozen=True)
class Found:
    """Where a search ended."""

    value: float
    """Of the knob."""
    cost: float
    """Measured with it."""
    lowest: float
    """Cost at the knob's lower end."""
    highest: float
    """Cost at the knob's upper end."""


def matched(config: RunConfig) -> RunConfig:
    """The configuration with the method's knob replaced so that it meets ``match``.

    Methods that read everything are left as they are.

    Parameters
    ----------
    config
        ``match.target`` is set.

    Raises
    ------
    UsageError
        If the method has no knob to search along, or no value of it meets the target.
    """
    name = config.method["name"]
    method = make_method(config.method)
    knob = method.cost_knob
    target = f"match.{config.match.target}={config.match.value}"
    plain = replace(config, match=replace(config.match, target=None))
    if knob is None and method.reads_everything:
        console.print(f"{target}: method {name} reads everything and is left as it is")
        return plain
    if knob is None:
        raise UsageError(f"{target}: method {name} has no knob that changes what it reads")
    workload = load_workload(_calibration(config))
    path, identity = _memory(config, knob, workload)
    if config.dry_run and not path.exists():
        console.print(f"{target}: {knob.name} is searched for when it runs; shown with {config.method[knob.name]}")
        return plain
    found = _remembered(path) or _searched(config, knob, workload, path, identity)
    prompts = f"{len(workload.items)} calibration prompts"
    if abs(found.cost - config.match.value) > TOLERANCE:
        raise UsageError(
            f"{target}: method {name} cannot meet it on {prompts}; {knob.name} spans {found.lowest:.4f} to "
            f"{found.highest:.4f} and comes nearest with {found.value:.6g}: {found.cost:.4f}; {_cure(config)}"
        )
    console.print(f"{target}: {knob.name}={found.value:.6g} measures {found.cost:.4f} on {prompts}")
    return replace(plain, method={**config.method, knob.name: found.value})


def _cure(config: RunConfig) -> str:
    longer = "a longer task.length may" if "length" in config.task else "longer prompts may"
    return f"{longer}, or a smaller method.block_size" if "block_size" in config.method else longer


def search(cost: Callable[[float], float], knob: SearchKnob, target: float, longest: int) -> Found:
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
    Found
        The value tried whose cost is nearest.
    """
    whole = isinstance(knob.low, int)
    low, high = knob.low, longest if math.isinf(knob.high) else knob.high
    tried = {low: cost(low), high: cost(high)}
    lowest, highest = tried[low], tried[high]
    while len(tried) < MOST_TRIALS and min(abs(c - target) for c in tried.values()) > CLOSE:
        middle = (low + high) // 2 if whole else (low + high) / 2
        if middle in tried:
            break
        tried[middle] = cost(middle)
        low, high = (middle, high) if tried[middle] < target else (low, middle)
    best = min(tried, key=lambda value: (abs(tried[value] - target), value))
    return Found(best, tried[best], lowest, highest)


@torch.inference_mode()
def replay_cost(traces: Sequence[Trace], method: Method, target: str, num_layers: int, executor: str) -> float:
    """What a method loads (``keep_io``) or reads (``bytes_ratio``) of dense's, over all layers.

    As in a run's own figures, an answer weighs by its decode steps, however few of them were recorded, and leading
    layers that the method leaves dense count as 1.
    """
    part = whole = 0.0
    for trace in traces:
        weight = 1.0 if trace.decode_steps is None else trace.decode_steps / len(trace.lengths)
        for layer, steps in groupby(replay_steps(trace, method, executor), key=lambda step: step.layer):
            if layer < method.dense_layers:
                continue
            for step in steps:
                step.storage.decode(step.q, trace.scale)
            report = layer_report(layer, True, step.storage)
            own = sum(report.union) / len(report.union) if target == "keep_io" else sum(report.bytes_read.values())
            part += weight * own
            whole += weight * (report.context if target == "keep_io" else report.dense_bytes)
    sparse = num_layers - min(method.dense_layers, num_layers)
    ratio = part / whole if whole else 1.0
    return (ratio * sparse + (num_layers - sparse)) / num_layers


def _memory(config: RunConfig, knob: SearchKnob, workload: Workload) -> tuple[Path, dict[str, Any]]:
    """Where the result of a search is kept beside the runs, and everything that decides it."""
    identity = {
        **_trace_identity(config, workload),
        "method": {k: v for k, v in config.method.items() if k != knob.name},
        "target": [config.match.target, config.match.value],
        **code_and_machine(["ffd.teacher", method_class(config.method["name"]).__module__, "eval.fidelity.replay"]),
    }
    name = f"{config.method['name'].rpartition(':')[2]}-{digest(identity)[:16]}.json"
    return config.root / "match" / name, identity


def _trace_identity(config: RunConfig, workload: Workload) -> dict[str, Any]:
    return {
        **code_and_machine(["ffd.teacher", "ffd.methods.dense", "eval.fidelity.traces"]),
        "model": workload.model.revision,
        "dtype": workload.spec.dtype,
        "prompts": workload.fingerprint,
        "every": config.fidelity.every,
        "executor": workload.executor,
        "weights": "decode steps",
    }


def _remembered(path: Path) -> Found | None:
    stored = read_json(path)
    if stored is None:
        return None
    found = {field.name: stored.get(field.name) if isinstance(stored, dict) else None for field in fields(Found)}
    if not all(isinstance(value, int | float) for value in found.values()):
        raise UsageError(f"{path}: expected the result of a search with {', '.join(found)}; move the file away")
    return Found(**found)


def _searched(config: RunConfig, knob: SearchKnob, workload: Workload, path: Path, identity: dict[str, Any]) -> Found:
    traces = _traces(config, workload)
    if not traces:
        raise UsageError(f"match.samples={config.match.samples}: no calibration prompt has an answer of two tokens")
    layers = workload.model.config.get_text_config(decoder=True).num_hidden_layers
    target = str(config.match.target)

    def cost(value: float) -> float:
        method = make_method({**config.method, knob.name: value})
        with refusals():
            return replay_cost(traces, method, target, layers, config.executor)

    longest = max(int(t.lengths.max()) for t in traces)
    try:
        found = search(cost, knob, config.match.value, longest)
    except Exception as error:
        why = method_failure(error, [config.method["name"]])
        if why is None or isinstance(error, UsageError):
            raise
        raise RunFailedError(f"match.{target}={config.match.value}: {why}") from error
    stored = {**vars(found), "method": identity["method"], "target": identity["target"]}
    write_atomically(path, json.dumps(stored, indent=2).encode() + b"\n")
    return found


def _calibration(config: RunConfig) -> RunConfig:
    task = {**config.task, "samples": config.match.samples} if "samples" in config.task else config.task
    return replace(for_calibration(config), task=task, shard=None)


def _traces(config: RunConfig, workload: Workload) -> list[Trace]:
    """Traces of the calibration prompts, recorded once for all methods that are matched on them."""
    folder = config.root / "match" / "traces" / digest(_trace_identity(config, workload))[:16]
    done = folder / "complete"
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder / ".lock"):  # jobs of a sweep on several GPUs want the same traces at the same time
        if not done.exists():
            clear_leftovers(folder)
            for _ in record_traces(config, workload, workload.load(), workload.items, folder):
                pass
            done.touch()
    return load_traces(sorted(folder.glob("*.safetensors")))
