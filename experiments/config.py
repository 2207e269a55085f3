"""From Hydra's composed configuration to one validated, frozen `RunConfig`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from experiments.bench_config import BenchOptions, bench_options
from experiments.checks import (
    boolean,
    choice,
    group,
    integer,
    names,
    settings,
    switch,
    switches,
    text,
    written,
)
from experiments.errors import UsageError, removed
from experiments.method_config import method_config
from experiments.options import (
    MATCH_TARGETS,
    TRACE_MODES,
    CalibrateOptions,
    FidelityOptions,
    MatchOptions,
    calibrate_options,
    fidelity_options,
    match_options,
)
from experiments.suggestions import unknown_key
from experiments.unread import refuse_unread

RUNNERS = ("accuracy", "prompts", "fidelity", "calibrate", "kernel", "throughput")
TRACKERS = ("wandb", "none")
EXECUTORS = ("auto", "fused", "reference")
_KEYS = (
    "method", "model", "task", "runner", "executor", "tracker", "delta", "delta_unit", "seed", "out", "rerun",
    "dry_run", "shard", "fidelity", "trace", "match", "calibrate",
    "bench", "engine",
)  # fmt: skip
_SETTINGS = {
    "fidelity": [field.name for field in fields(FidelityOptions) if field.name != "trace"],
    "match": [*MATCH_TARGETS, "samples"],
    "calibrate": [field.name for field in fields(CalibrateOptions)],
    "bench": [field.name for field in fields(BenchOptions)],
    "engine": ["graph", "fuse", "prefill_chunk"],
}
"""Keys of each group."""
_MODEL_KEYS = ("name", "path", "revision", "dtype")
_MOST_SAMPLES = 100_000
_LARGEST_SEED = 2**32 - 1  # numpy's


@dataclass(frozen=True)
class RunConfig:
    """Everything one run was asked for, checked as far as it can be without data or weights."""

    method: Mapping[str, Any]
    """``name`` and knobs."""
    model: Mapping[str, Any]
    """``name, path, revision, dtype``."""
    task: Mapping[str, Any]
    """``name`` and the suite's own keys."""
    runner: str
    executor: str
    tracker: str
    seed: int
    out: Path | None
    """Folder of results; None means ``outputs``."""
    rerun: bool
    dry_run: bool
    fidelity: FidelityOptions
    match: MatchOptions
    calibrate: CalibrateOptions
    bench: BenchOptions
    graph: bool | str
    fuses: tuple[bool | str, ...]
    """``engine.fuse``, one value; with runner=throughput one or more."""
    prefill_chunk: int | None
    shard: str | None
    """``i/n``: run every n-th sample only; None runs all. Not part of the identity."""

    @property
    def fidelity_every(self) -> int:
        """Probe each n-th decode step; 0 never."""
        return self.fidelity.every

    @property
    def replays(self) -> bool:
        """Whether recorded traces take the place of model and prompts."""
        return self.fidelity.trace == "replay"

    @property
    def fuse(self) -> bool | str:
        """What an engine is given, where all are given the same."""
        return self.fuses[0]

    @property
    def root(self) -> Path:
        """Folder of results."""
        return self.out or Path("outputs")

    def resolved(self) -> dict[str, Any]:
        """What decides the results, JSON-ready: part of the run's identity and its ``config.yaml``."""
        return {
            "method": dict(self.method),
            "model": dict(self.model),
            "task": dict(self.task),
            "runner": self.runner,
            "seed": self.seed,
            "fidelity": {"every": self.fidelity_every},
            "engine": {"graph": self.graph, "fuse": self.fuse, "prefill_chunk": self.prefill_chunk},
        }


def _task_types(task: Mapping[str, Any]) -> None:
    for key, most in (("length", None), ("samples", _MOST_SAMPLES)):
        if task.get(key) is not None:
            integer(f"task.{key}", task[key], minimum=1, maximum=most)
    names("task.tasks", task.get("tasks"))
    for key in ("template", "data_dir", "profile"):
        text(f"task.{key}", task.get(key))


def run_config(composed: Mapping[str, Any], *, multirun: bool = False) -> RunConfig:
    """Validate a composed configuration; see `_run_config`. A key that was removed (``~key``) is named too."""
    try:
        return _run_config(composed, multirun=multirun)
    except KeyError as error:
        raise removed(error.args[0]) from None


def _run_config(composed: Mapping[str, Any], *, multirun: bool) -> RunConfig:
    """Validate a composed configuration.

    Parameters
    ----------
    composed
        Hydra's configuration as plain containers, interpolations resolved.
    multirun
        Whether it is one job of a sweep, where an alias that the method does not have is dropped
        instead of refused.

    Raises
    ------
    UsageError
        For the first value that is not accepted.
    """
    values = dict(composed)
    for key in values:
        if key not in _KEYS:
            raise UsageError(unknown_key(key, f"{key}={written(values[key])}"))
    method = method_config(values, multirun)
    task, model = group(values, "task"), group(values, "model")
    _task_types(task)
    for key in model:
        if key not in _MODEL_KEYS:
            raise UsageError(f"model.{key}={model[key]}: no such key; expected one of {', '.join(_MODEL_KEYS)}")
        text(f"model.{key}", model[key])
    choice("runner", values["runner"], RUNNERS)
    choice("executor", values["executor"], EXECUTORS)
    choice("tracker", values["tracker"], TRACKERS)
    engine = settings(values, "engine", _SETTINGS["engine"])
    if engine["prefill_chunk"] is not None:
        integer("engine.prefill_chunk", engine["prefill_chunk"], minimum=1)
    out = text("out", values["out"], accepted="a folder")
    config = RunConfig(
        method=method,
        model=model,
        task=task,
        runner=values["runner"],
        executor=values["executor"],
        tracker=values["tracker"],
        seed=integer("seed", values["seed"], minimum=0, maximum=_LARGEST_SEED),
        out=None if out is None else Path(out),
        rerun=boolean("rerun", values["rerun"]),
        dry_run=boolean("dry_run", values["dry_run"]),
        fidelity=fidelity_options(settings(values, "fidelity", _SETTINGS["fidelity"]), _trace(values)),
        match=match_options(settings(values, "match", _SETTINGS["match"])),
        calibrate=calibrate_options(settings(values, "calibrate", _SETTINGS["calibrate"])),
        bench=bench_options(settings(values, "bench", _SETTINGS["bench"])),
        graph=switch("engine.graph", engine["graph"]),
        fuses=switches("engine.fuse", engine["fuse"], several_with="throughput", runner=values["runner"]),
        prefill_chunk=engine["prefill_chunk"],
        shard=_shard(values),
    )
    refuse_unread(values)
    return config


def _trace(values: Mapping[str, Any]) -> str:
    trace = choice("trace", values["trace"], TRACE_MODES)
    if trace != "none" and values["runner"] != "fidelity":
        raise UsageError(f"trace={trace}: runner={values['runner']} has no traces; only runner=fidelity has")
    return trace


def _shard(values: Mapping[str, Any]) -> str | None:
    value = values.get("shard")
    if value is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", str(value))
    if found is None or int(found[1]) > int(found[2]):
        raise UsageError(f"shard={value}: expected i/n with 1 <= i <= n, e.g. 1/4")
    if values["runner"] != "accuracy":
        raise UsageError(f"shard={value}: runner={values['runner']} is not divided; only runner=accuracy is")
    return str(value)
