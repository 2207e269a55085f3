"""Checks of single configuration values; each failure is one line with key, value and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from experiments.errors import RENAMED, UsageError, removed, renamed


def refusal(key: str, value: Any, accepted: str) -> UsageError:
    """The error for a value that is not accepted, written as the command line writes it."""
    return UsageError(f"{key}={written(value)}: expected {accepted}")


def written(value: Any) -> str:
    """A value as the command line writes it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def choice(key: str, value: Any, accepted: tuple[str, ...]) -> str:
    """One of a few names."""
    if not isinstance(value, str) or value not in accepted:
        raise refusal(key, value, f"one of {', '.join(accepted)}")
    return value


def integer(key: str, value: Any, *, minimum: int, maximum: int | None = None) -> int:
    """A whole number within bounds."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < minimum or (maximum is not None and value > maximum):
        raise refusal(key, value, f"an integer >= {minimum}" + ("" if maximum is None else f" and <= {maximum}"))
    return int(value)


def boolean(key: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise refusal(key, value, "true or false")
    return value


_SWITCH = "auto, true or false"


def switch(key: str, value: Any) -> bool | str:
    """True, false, or auto."""
    if not isinstance(value, bool) and value != "auto":
        raise refusal(key, value, _SWITCH)
    return value


def switches(key: str, value: Any, *, several_with: str, runner: str) -> tuple[bool | str, ...]:
    """One `switch`; a list of them, without repetitions, with one runner alone."""
    if not isinstance(value, list | tuple):
        return (switch(key, value),)
    if runner != several_with:
        raise refusal(key, value, f"{_SWITCH}; a list of them with runner={several_with} alone")
    if not value:
        raise refusal(key, value, f"{_SWITCH}, or a list of them")
    return tuple(dict.fromkeys(switch(key, entry) for entry in value))


def text(key: str, value: Any, *, accepted: str = "text") -> str | None:
    """Text that is not empty, or null."""
    if value is not None and (not isinstance(value, str) or not value):
        raise refusal(key, value, f"{accepted}, or null")
    return value


def names(key: str, value: Any) -> None:
    """A name, a list of names, or null."""
    listed = [value] if isinstance(value, str) else value
    if listed is None:
        return
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
        raise refusal(key, value, "a list of names such as [vt,cwe], or null")


def delta(key: str, value: Any) -> float:
    """FFD's margin."""
    try:
        margin = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        margin = math.nan
    if not margin >= 0:
        raise refusal(key, value, "a number >= 0 (natural-log units; inf keeps everything)")
    return margin


def mapping(values: Mapping[str, Any], key: str, accepted: str = "keys and values") -> dict[str, Any]:
    """A group of keys."""
    value = values.get(key)
    if not isinstance(value, Mapping):
        raise refusal(key, value, accepted)
    return dict(value)


def settings(values: Mapping[str, Any], key: str, known: Iterable[str]) -> dict[str, Any]:
    """A group of keys, all that are known and no other: one that was added (``+key.other=1``) would be passed over."""
    found, names = mapping(values, key), tuple(known)
    for name in found:
        if f"{key}.{name}" in RENAMED:
            raise renamed(f"{key}.{name}", f"{key}.{name}={written(found[name])}")
        if name not in names:
            raise UsageError(f"{key}.{name}={found[name]}: no such key; expected one of {', '.join(names)}")
    for name in names:
        if name not in found:
            raise removed(f"{key}.{name}")
    return found


def group(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A configuration group with its name."""
    found = mapping(values, key, f"one of the names in conf/{key}/")
    if not isinstance(found.get("name"), str) or not found["name"]:
        raise refusal(f"{key}.name", found.get("name"), f"one of the names in conf/{key}/")
    return found
