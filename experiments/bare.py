"""What the commands for a bare GPU machine share: numbers on the command line, and how records are written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.errors import UsageError
from experiments.files import json_ready, write_atomically


def whole(minimum: int) -> Callable[[str], int]:
    """Whole numbers of the command line, for ``type=``."""

    def parsed(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text}: expected an integer >= {minimum}")
        return value

    return parsed


def share(text: str) -> float:
    """Shares in (0, 1] of the command line, for ``type=``."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number in (0, 1]")
    return value


def record_path(text: str) -> Path:
    """Path of a record, its folder made, for ``type=``: hours of measuring must not end in a write error."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: cannot be written ({error.strerror})") from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: expected a file, not a folder")
    return path


def require_new(path: Path) -> None:
    """Raise `UsageError` where a record is there already: it would be lost."""
    if path.exists():
        raise UsageError(f"--out={path}: exists already; expected a new file")


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a record in one move."""
    write_atomically(path, (json.dumps(json_ready(content), indent=1, allow_nan=False) + "\n").encode())
