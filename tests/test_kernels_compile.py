"""Every fused path compiles for a GPU, shown without one: the interpreter accepts what the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ffd.methods import method_names

COMPONENTS = (
    "component,bits=2,path=decoupled",
    "component,bits=4,select=topk",
    "component,bits=8,select=topp,path=decoupled,block_size=256",
    "component,bits=16,select=topk,path=decoupled,sub_block=32",
    "component,bits=16",
)


@pytest.mark.parametrize("name", [*method_names(), *COMPONENTS, "kivi,bits=4"])
def test_the_fused_path_compiles_for_an_h100(name: str) -> None:
    root = Path(__file__).resolve().parent.parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_ahead", name],
        cwd=root,
        env={**environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "_kernel shared=" in run.stdout
