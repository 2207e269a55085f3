"""What a run ran on: enough to repeat it, nothing that names a person or a machine."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "transformers", "hydra-core", "datasets", "numpy", "wonderwords", "nltk", "lm-eval")


def versions(packages: tuple[str, ...] = _PACKAGES) -> dict[str, str | None]:
    """Installed versions, None where a package is absent."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def device_class() -> str:
    """Name of the GPU, or ``cpu``."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@cache
def git_revision() -> dict[str, Any]:
    """Commit of the checkout and whether tracked files differ from it, when first asked; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "modified": None if status is None else bool(status)}


def describe() -> dict[str, Any]:
    """Everything for ``environment.json``."""
    import torch

    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device_class(),
        "cuda": torch.version.cuda,
        "cpu_threads": torch.get_num_threads(),
        "versions": versions(),
        "git": git_revision(),
        "command": ["python", "run.py", *sys.argv[1:]],
    }
