"""From a sweep's command line to the jobs it means: inapplicable knobs dropped, equal jobs once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.config import run_config
from experiments.errors import UsageError, hydra_line
from experiments.keys import CONF, choice
from experiments.method_config import ALIASES
from experiments.suggestions import meant_instead
from experiments.unread import is_for_match_alone

_GROUPS_WITH_KNOBS = ("method", "task")


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    """Its command line."""
    dropped: tuple[str, ...] = ()
    """Knobs of the sweep that its method or task does not have."""
    skip: str | None = None
    """Why it is not run."""


def combinations(arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of the values that the arguments list, in Hydra's order.

    Must be called inside Hydra's ``initialize_config_dir``.

    Raises
    ------
    UsageError
        For an argument that Hydra cannot parse, or a sweep over a range without steps.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        overrides = OverridesParser.create(GlobalHydra.instance().hydra.config_loader).parse_overrides(list(arguments))
        axes: dict[str, list[str]] = {}
        for override in overrides:
            key = override.get_key_element()
            if override.is_sweep_override():
                axes[key] = [f"{key}={value}" for value in override.sweep_iterator(_as_typed)]
            else:
                axes[key] = [str(override.input_line)]  # as typed: interpolations and quotes included
    except HydraException as error:
        raise UsageError(hydra_line(error, arguments)) from None
    return list(itertools.product(*axes.values()))


def _as_typed(value: Any) -> str:
    """A value as a command line has it: Hydra writes Python's True and False."""
    from hydra.core.override_parser.types import Transformer

    return Transformer.str(_spelt(value))


def _spelt(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return [_spelt(entry) for entry in value]
    return {key: _spelt(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def plan(sweeps: Iterable[Sequence[str]]) -> list[Job]:
    """Jobs of several sweeps (each a list of arguments), equal ones once, in order of first appearance.

    Must be called inside Hydra's ``initialize_config_dir``.

    Raises
    ------
    UsageError
        For an argument that no job can use, or that does not compose.
    """
    jobs: dict[str, Job] = {}
    for arguments in sweeps:
        expanded = combinations(arguments)
        _refuse_useless(expanded)
        for overrides in expanded:
            kept, dropped = _applicable(overrides)
            job = Job(kept, dropped)
            jobs.setdefault(_meaning(job), job)
    return list(jobs.values())


def dropped_lines(jobs: Iterable[Job]) -> list[str]:
    """What was left out of which jobs, one line per method or task."""
    left_out: dict[str, dict[str, None]] = {}
    for job in jobs:
        for override in job.dropped:
            whole = (*job.overrides, *job.dropped)
            group = "method" if _is_for_match(override, whole) else _knob(override)[0]
            left_out.setdefault(f"{group}={choice(job.overrides, group)}", {})[override] = None
    return [f"{chosen}: runs without {', '.join(overrides)}" for chosen, overrides in left_out.items()]


def _applicable(overrides: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    knobs = {group: _knobs(group, choice(overrides, group)) for group in _GROUPS_WITH_KNOBS}
    kept, dropped = [], []
    for override in overrides:
        group, knob = _knob(override)
        known = knobs.get(group)
        if _is_for_match(override, overrides):
            applies = not _reads_everything(choice(overrides, "method"))
        else:
            applies = known is None or knob in known  # a group without a file of its own is Hydra's to refuse
        (kept if applies else dropped).append(override)
    return tuple(kept), tuple(dropped)


def _is_for_match(override: str, overrides: Sequence[str]) -> bool:
    """Whether this is a cost to match, or is read only because there is one."""
    if not any(other.startswith("match.") for other in overrides):
        return False
    key = override.partition("=")[0]
    return key.startswith("match.") or is_for_match_alone(key, choice(overrides, "runner"))


def _reads_everything(method: str) -> bool:
    from ffd.methods import KnobError, method_class

    try:
        found = method_class(method)
    except KnobError:  # its job says so
        return False
    return found.search_knob is None and found.reads_everything


def _knob(override: str) -> tuple[str, str]:
    """Group and knob of an override; an empty group where it is neither a method's nor a task's."""
    key = override.partition("=")[0]
    if key in ALIASES:
        return "method", key
    group, _, rest = key.partition(".")
    return (group, rest.split(".")[0]) if group in _GROUPS_WITH_KNOBS and rest else ("", key)


def _knobs(group: str, name: str) -> frozenset[str] | None:
    import yaml

    path = CONF / group / f"{name}.yaml"
    return frozenset(yaml.safe_load(path.read_text())) if path.is_file() else None


def _refuse_useless(expanded: Sequence[Sequence[str]]) -> None:
    dropped = [set(_applicable(overrides)[1]) for overrides in expanded]
    for override in sorted(set.intersection(*dropped) if dropped else ()):
        if any(_is_for_match(override, overrides) for overrides in expanded):
            continue  # what reads everything is run as it is: the rows that a matched table is read against
        group, knob = _knob(override)
        names = list(dict.fromkeys(choice(overrides, group) for overrides in expanded))
        said = f"{override}: no {group} of this sweep has a knob {knob} ({', '.join(names)})"
        key = override.partition("=")[0]
        raise UsageError(said + ("" if key in ALIASES else meant_instead(key, override, {group: names})))


def _meaning(job: Job) -> str:
    """What tells a job from others: its resolved configuration, however it was spelt."""
    from hydra import compose
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        composed: Any = OmegaConf.to_container(compose("config", overrides=list(job.overrides)), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(hydra_line(error, job.overrides)) from None
    try:
        config = run_config(composed)
    except UsageError:
        # It will fail as a job of its own, and the sweep's table says why.
        return json.dumps(composed, sort_keys=True)
    resolved = {"method": dict(config.method), "delta": None, "delta_unit": None}
    return json.dumps({**composed, **resolved}, sort_keys=True, default=str)
