"""Kinds of knob values: what a knob's annotation accepts, before the method's own check says which values of it."""

from __future__ import annotations

from typing import Any

LARGEST = 2**31 - 1
"""Of whole numbers: kernels count in 32 bits."""
_KINDS = {
    "int": "an integer below 2**31",
    "float": "a number",
    "str": "a name",
    "bool": "true or false",
    "None": "null",
}


def wrong_kind(annotation: Any, value: object) -> str | None:
    """What a knob accepts, where the value is nothing of the kind; else None.

    Python takes True for 1 and 128.0 for 128: a run would have another identity, or fail in a kernel.

    Parameters
    ----------
    annotation
        Of the field, as written; one that names other types than numbers, names, booleans and None is not judged.
    value
        As given.
    """
    parts = [part.strip() for part in annotation.split("|")] if isinstance(annotation, str) else []
    if not parts or not all(part in _KINDS for part in parts):
        return None
    if any(_is(part, value) for part in parts):
        return None
    return " or ".join(_KINDS[part] for part in parts)


def _is(part: str, value: object) -> bool:
    if part == "None":
        return value is None
    if isinstance(value, bool):
        return part == "bool"
    if part == "int":
        return isinstance(value, int) and abs(value) <= LARGEST
    if part == "float":
        return isinstance(value, int | float)
    return part == "str" and isinstance(value, str)
