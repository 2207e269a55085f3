"""Files that readers see whole or not at all, locks, and JSON without numbers that JSON does not have."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.errors import UsageError


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> None:
    """Remove what killed processes left half written below a folder, traces of gigabytes among it.

    Their names end in a process id, so that nothing else would ever replace them. Nobody may be writing there.
    """
    for path in folder.rglob(".*"):
        if re.fullmatch(r"\..+\.\d+\.(tmp|partial)", path.name):
            path.unlink(missing_ok=True)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock file, waiting for whoever holds it; the system releases it when the process ends."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def held_alone(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file, or raise `UsageError` where another process holds it; ``what`` is said to be at work."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{what}: another process is running it") from None
        yield


def json_ready(value: Any) -> Any:
    """The value with non-finite numbers, which JSON does not have, as the strings that the command line takes."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return value


def read_json(path: Path) -> Any:
    """Parse a JSON file, or None where it does not exist; `UsageError` names one that cannot be read."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # a directory, not text, not JSON
        raise UsageError(f"{path}: damaged ({type(error).__name__}); move it away, or use another out=") from None
