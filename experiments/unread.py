"""Keys that the chosen runner does not read: a value other than their default is refused, not passed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.checks import written
from experiments.errors import UsageError
from experiments.keys import base_config
from experiments.options import MATCH_TARGETS

_RECORD, _REPLAY, _MATCH = "runner=fidelity trace=record", "runner=fidelity trace=replay", "match.*"
_STUDIES = ("runner=fidelity", _RECORD, "runner=calibrate", _MATCH)


@dataclass(frozen=True)
class _Reading:
    """Keys of one group and who reads them."""

    group: str
    names: tuple[str, ...]
    """Without the group."""
    readers: tuple[str, ...]
    """Runners, with what they do with traces; `_MATCH` is any of them that is given a cost to match."""
    said: str
    """The readers, in words."""


_TABLE = (
    _Reading(
        "fidelity",
        ("text_file", "prompts", "prompt_tokens", "new_tokens"),
        _STUDIES,
        "runner=fidelity (without trace=replay), runner=calibrate and match.* do",
    ),
    _Reading("fidelity", ("layers", "values"), (_RECORD,), f"{_RECORD} does"),
    _Reading("fidelity", ("traces", "sweep"), (_REPLAY,), f"{_REPLAY} does"),
    _Reading("calibrate", ("target", "value", "per", "holdout"), ("runner=calibrate",), "runner=calibrate does"),
    _Reading(
        "bench",
        ("B", "T", "kept"),
        ("runner=kernel", "runner=throughput"),
        "runner=kernel and runner=throughput do",
    ),
    _Reading(
        "bench",
        ("G", "Hkv", "d", "dtype", "l2", "timing", "stages", "source", "traces"),
        ("runner=kernel",),
        "runner=kernel does",
    ),
    _Reading("bench", ("geometry", "protocols", "prefill_tokens"), ("runner=throughput",), "runner=throughput does"),
)
"""Every key of these groups but ``fidelity.every``, which may stand in any command."""


def refuse_unread(values: Mapping[str, Any]) -> None:
    """Raise `UsageError` for the first key that has not its default in ``conf/config.yaml`` and is not read.

    Parameters
    ----------
    values
        The composed configuration, its values already checked.
    """
    trace = "" if values["trace"] == "none" else f" trace={values['trace']}"
    kind = f"runner={values['runner']}{trace}"
    matched = any(values["match"][target] is not None for target in MATCH_TARGETS)
    for entry in _TABLE:
        if kind in entry.readers or (matched and _MATCH in entry.readers):
            continue
        for name in entry.names:
            value = values[entry.group][name]
            if value != base_config()[entry.group][name]:
                key = f"{entry.group}.{name}"
                typed = key if isinstance(value, Mapping) else f"{key}={written(value)}"
                raise UsageError(f"{typed}: {kind} does not read it; only {entry.said}")


def is_for_match_alone(key: str, runner: str) -> bool:
    """Whether a runner reads this key, such as ``fidelity.new_tokens``, only where a cost is matched."""
    return any(
        _MATCH in entry.readers and f"runner={runner}" not in entry.readers
        for entry in _TABLE
        if key in [f"{entry.group}.{name}" for name in entry.names]
    )
