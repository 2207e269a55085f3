"""JSON Lines with one clear error per fault: which file, which line, which field, what is accepted."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from eval.records import TaskError, excerpt


@dataclass(frozen=True)
class Kind:
    """What a field may hold."""

    accepted: str
    """In words, for errors."""
    holds: Callable[[Any], bool]


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


TEXT = Kind("a string", lambda value: isinstance(value, str))
TEXTS = Kind("a list of strings", _is_texts)
TEXTS_OR_NULL = Kind("a list of strings or null", lambda value: value is None or _is_texts(value))
CLASSES = Kind("a non-empty list of strings", lambda value: _is_texts(value) and bool(value))
INTEGER = Kind("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool))


@contextmanager
def reading(file: Path | str) -> Iterator[None]:
    """Turn every failure to read a file into a `TaskError` that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{file}: not UTF-8 text ({error.reason}, byte {error.start}); accepted: one JSON object a line"
        ) from None
    except OSError as error:
        raise TaskError(f"{file}: cannot be read ({error.strerror or error}); accepted: a readable file") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise TaskError(f"{file}: cannot be unpacked ({error}); accepted: a whole zip archive") from None


def read_objects(lines: TextIO, file: Path | str, schema: Mapping[str, Kind]) -> Iterator[dict[str, Any]]:
    """JSON objects of an open file, one per line that is not blank, each checked against `schema`.

    Raises
    ------
    TaskError
        A line is not a JSON object, or a field of `schema` is missing or of another kind.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _parse(line, f"{file}, line {number}", schema)


def _parse(line: str, where: str, schema: Mapping[str, Kind]) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise TaskError(f"{where}: not JSON ({error}); accepted: one JSON object a line") from None
    if not isinstance(item, dict):
        raise TaskError(f"{where}: a JSON {type(item).__name__}; accepted: an object with {', '.join(schema)}")
    for name, kind in schema.items():
        if name not in item:
            raise TaskError(f"{where}: field {name!r} is missing; accepted: an object with {', '.join(schema)}")
        if not kind.holds(item[name]):
            raise TaskError(f"{where}: field {name!r} is {excerpt(item[name])}; accepted: {kind.accepted}")
    return item
