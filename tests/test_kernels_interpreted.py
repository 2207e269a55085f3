"""Runs ``tests/kernels`` under Triton's interpreter.

The interpreter is chosen when a kernel is defined, by an environment variable, for the whole process:
a process of its own keeps it away from every other test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "kernels").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES)
def test_kernels_equal_the_reference_under_the_interpreter(file: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout.splitlines()[-1], "the interpreter leaves no test out"
