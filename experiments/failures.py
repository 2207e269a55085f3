"""What ended a run, in one line: the error, and the method in whose code it was raised."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path

from experiments.errors import one_line

_OURS = ("eval", "experiments", "ffd")
"""Packages whose frames are in every traceback: of a method that lives in one of them its own module alone counts."""


def failure(error: BaseException, methods: Iterable[str]) -> str:
    """Type and message of an error, after the method of ``methods`` that raised it if one did."""
    return method_failure(error, methods) or f"{type(error).__name__}: {one_line(error)}"


def method_failure(error: BaseException, methods: Iterable[str]) -> str | None:
    """What a method's code raised and where, or None where it was not at work.

    Parameters
    ----------
    error
        As caught, with its traceback from there on.
    methods
        Names of the methods that ran.

    Returns
    -------
    str
        Names the method's function that was called, and the line that the method's code had come to.
    """
    from ffd.methods import method_class

    walked = list(traceback.walk_tb(error.__traceback__))
    for name in methods:
        module = method_class(name).__module__
        package = module.partition(".")[0]
        home = module if package in _OURS else package
        own = [(frame.f_code, line) for frame, line in walked if _within(frame.f_globals.get("__name__", ""), home)]
        if own:
            (called, _), (last, line) = own[0], own[-1]
            where = f"{called.co_name} ({Path(last.co_filename).name}, line {line})"
            return f"method={name}: {type(error).__name__} in {where}: {one_line(error)}"
    return None


def _within(module: str, home: str) -> bool:
    return f"{module}.".startswith(f"{home}.")
