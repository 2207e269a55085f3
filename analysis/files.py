"""Files that readers see whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> Path:
    """Write a file by one rename, its folder included; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path
