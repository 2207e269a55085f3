"""Keys of the runners that study a method: fidelity, traces, calibration, matched comparison."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.checks import boolean, choice, integer, refusal
from experiments.errors import UsageError

TRACE_MODES = ("none", "record", "replay")
CALIBRATE_TARGETS = ("mass_recall", "lse_error", "bytes_ratio")
CALIBRATE_PER = ("global", "layer", "head")
MATCH_TARGETS = ("bytes_ratio", "keep_io")


@dataclass(frozen=True)
class Point:
    """One method of a sweep."""

    series: str
    """Name of the sweep's entry."""
    method: Mapping[str, Any]
    """``name`` and knobs."""

    @property
    def label(self) -> str:
        """Series and knobs."""
        return self._with(knob for knob in self.method if knob != "name")

    @property
    def rule(self) -> str:
        """Series and knobs but the one to search along: points of one rule are drawn as one line."""
        from ffd.methods import create

        searched = create(self.method["name"], {k: v for k, v in self.method.items() if k != "name"}).cost_knob
        return self._with(k for k in self.method if k != "name" and (searched is None or k != searched.name))

    def _with(self, knobs: Iterable[str]) -> str:
        return " ".join([self.series, *(f"{knob}={self.method[knob]}" for knob in knobs)])


@dataclass(frozen=True)
class FidelityOptions:
    """``fidelity.*`` and ``trace``."""

    every: int
    """Probe each n-th decode step; 0 never (accuracy runs only)."""
    text_file: Path | None
    """Plain text in place of a task's prompts."""
    prompts: int
    """Pieces cut from the text file."""
    prompt_tokens: int
    """Prompt of each piece."""
    new_tokens: int
    """Most decode steps of a prompt."""
    trace: str
    """none, record or replay."""
    layers: tuple[int, ...] | None
    """Model layers that a trace records; None for all."""
    values: bool
    """Whether a trace records values, which output metrics need."""
    traces: Path | None
    """Trace file, or folder of them, to replay."""
    sweep: tuple[Point, ...]
    """What to replay."""


@dataclass(frozen=True)
class MatchOptions:
    """``match.*``: the cost at which methods are compared."""

    target: str | None
    """bytes_ratio or keep_io; None where nothing is matched."""
    value: float
    samples: int
    """Calibration prompts a task."""


@dataclass(frozen=True)
class CalibrateOptions:
    """``calibrate.*``."""

    target: str
    """mass_recall, lse_error or bytes_ratio."""
    value: float
    per: str
    """global, layer or head."""
    holdout: float
    """Share of the prompts that only check the result."""


def fidelity_options(composed: Mapping[str, Any], trace: str) -> FidelityOptions:
    """Validate ``fidelity.*``; raises `UsageError`."""
    layers = composed["layers"]
    if layers is not None:
        layers = tuple(integer("fidelity.layers", layer, minimum=0) for layer in _list("fidelity.layers", layers))
    return FidelityOptions(
        every=integer("fidelity.every", composed["every"], minimum=0),
        text_file=_path(composed["text_file"]),
        prompts=integer("fidelity.prompts", composed["prompts"], minimum=1),
        prompt_tokens=integer("fidelity.prompt_tokens", composed["prompt_tokens"], minimum=1),
        new_tokens=integer("fidelity.new_tokens", composed["new_tokens"], minimum=2),
        trace=trace,
        layers=layers,
        values=boolean("fidelity.values", composed["values"]),
        traces=_path(composed["traces"]),
        sweep=sweep_points(composed["sweep"] or {}) if trace == "replay" else (),
    )


def match_options(composed: Mapping[str, Any]) -> MatchOptions:
    """Validate ``match.*``; raises `UsageError`."""
    asked = [(name, composed[name]) for name in MATCH_TARGETS if composed[name] is not None]
    if len(asked) > 1:
        raise UsageError(f"match.{asked[1][0]}={asked[1][1]}: expected one target, match.{asked[0][0]} is set too")
    samples = integer("match.samples", composed["samples"], minimum=1)
    if not asked:
        return MatchOptions(None, 1.0, samples)
    name, value = asked[0]
    return MatchOptions(name, _ratio(f"match.{name}", value), samples)


def calibrate_options(composed: Mapping[str, Any]) -> CalibrateOptions:
    """Validate ``calibrate.*``; raises `UsageError`."""
    target = choice("calibrate.target", composed["target"], CALIBRATE_TARGETS)
    per, value = choice("calibrate.per", composed["per"], CALIBRATE_PER), composed["value"]
    if target == "lse_error":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise UsageError(f"calibrate.value={value}: expected a number of nats > 0")
    else:
        value = _ratio("calibrate.value", value)
    holdout = composed["holdout"]
    if isinstance(holdout, bool) or not isinstance(holdout, (int, float)) or not 0 <= holdout < 1:
        raise UsageError(f"calibrate.holdout={holdout}: expected a share in [0, 1)")
    return CalibrateOptions(target, float(value), per, float(holdout))


def sweep_points(sweep: Mapping[str, Any]) -> tuple[Point, ...]:
    """All combinations of each entry's lists of knob values.

    Parameters
    ----------
    sweep
        By series: ``method`` (the series' name if not given) and lists of knob values.

    Raises
    ------
    UsageError
        For a method, knob or value that does not exist.
    """
    from ffd.methods import KnobError, create

    if not isinstance(sweep, Mapping):
        raise UsageError(f"fidelity.sweep={sweep}: expected series, each with knobs and lists of values")
    points = []
    for series, grid in sweep.items():
        if not isinstance(grid, Mapping):
            raise UsageError(f"fidelity.sweep.{series}={grid}: expected knobs with lists of values")
        knobs = {knob: _list(f"fidelity.sweep.{series}.{knob}", v) for knob, v in grid.items() if knob != "method"}
        name = grid.get("method", str(series))
        if not isinstance(name, str):
            raise refusal(f"fidelity.sweep.{series}.method", name, "the name of a method")
        for values in itertools.product(*knobs.values()):
            chosen = dict(zip(knobs, values, strict=True))
            try:
                create(name, chosen)
            except KnobError as error:
                raise UsageError(f"fidelity.sweep.{series}.{error}") from None
            except TypeError:
                raise UsageError(f"fidelity.sweep.{series}: a value of the wrong type in {chosen}") from None
            points.append(Point(str(series), {"name": name, **chosen}))
    return tuple(points)


def _list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UsageError(f"{key}={value}: expected a list")
    return list(value)


def _ratio(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise UsageError(f"{key}={value}: expected a number in (0, 1]")
    return float(value)


def _path(value: Any) -> Path | None:
    return None if value is None else Path(str(value))
