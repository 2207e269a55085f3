"""What a user may have got wrong, in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from experiments.keys import CONF, known_keys
from experiments.suggestions import unknown_key

USAGE_EXIT = 2
FAILED_EXIT = 1
INVALID_EXIT = 3
INTERRUPTED_EXIT = 130


class UsageError(ValueError):
    """The request cannot be run; the message names the field, the value and what is accepted."""


class RunFailedError(Exception):
    """The run ended by an error after it had begun; its folder says so too."""


RENAMED = {"bench.fuse": "engine.fuse"}
"""Keys of earlier versions, and what they are called now."""


def renamed(key: str, typed: str) -> UsageError:
    """The error for a key of an earlier version."""
    return UsageError(f"{typed}: {key} is called {RENAMED[key]} now")


def removed(key: str) -> UsageError:
    """The error for a key that is not there (``~key``)."""
    return UsageError(f"{key}: this key must not be removed from the configuration")


def as_typed(said: str, aliases: Mapping[str, object]) -> str:
    """What a method says of a knob (``block_size=100: expected ...``), with the key that the user types.

    Parameters
    ----------
    said
        Begins with the knob's name, or with ``method=`` where there is no such method.
    aliases
        Top-level keys that stand for a knob, and their values; None where the knob itself was given.
    """
    knob = said.partition("=")[0]
    return said if knob == "method" or aliases.get(knob) is not None else f"method.{said}"


def one_line(error: BaseException) -> str:
    """Message of an error on one line."""
    return re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__


def first_line(error: BaseException) -> str:
    """What an error says, without the rest of a long message."""
    return (str(error).splitlines() or [""])[0]


def hydra_line(error: BaseException, overrides: Sequence[str]) -> str:
    """Rephrase a Hydra composition or parse error in one line that names what was typed.

    Parameters
    ----------
    error
        As raised by Hydra; its own text may run over many lines.
    overrides
        The command line's overrides, to find the one at fault.
    """
    text = str(error)
    missing = re.search(r"Could not find '(\w+)/([^']*)'", text)
    if missing:
        group, value = missing.groups()
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        return f"{group}={value}: expected one of {', '.join(options)}"
    unknown = (
        re.search(r"Key '([^']+)' is not in struct\s+full_key: (\S+)", text)
        or re.search(r"Could not override '([^']+)'", text)
        or re.search(r"Could not delete from config\. '([^']+)' does not exist", text)
    )
    if unknown:
        key = unknown.groups()[-1]
        typed = next((o for o in overrides if o.lstrip("+~").split("=")[0] == key), key)
        if key in RENAMED:
            return str(renamed(key, typed))
        if text.startswith("Could not delete") and key in known_keys():  # to Hydra a null is not there
            return str(removed(key))
        return unknown_key(key, typed, overrides)
    several = re.search(r"Ambiguous value for argument '(.+?)'$", text, flags=re.MULTILINE)
    if several:
        return _without_multirun(several[1])
    at_fault = re.search(r"at input '(.*?)'", text)
    typed = next((o for o in overrides if at_fault and at_fault.group(1) in o), None)
    return one_line(error) if typed is None else f"{typed}: {one_line(error)}"


def _without_multirun(typed: str) -> str:
    """What ``key=a,b`` lacks: a flag to run each, or brackets to be one list."""
    key, _, values = typed.partition("=")
    one_list = "" if (CONF / key).is_dir() else f"; as one list it is {key}=[{values}]"
    return f"{typed}: several values are run one by one with -m (python run.py -m {typed}){one_list}"
