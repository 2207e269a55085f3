"""The seam of fused modules: what is put in place, when, and that it is taken back."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import ffd
from ffd.cache import UnsupportedModelError
from ffd.fused_model import _difference, fuse
from ffd.fused_modules import is_linear, is_norm, is_swiglu_mlp
from ffd.fusion import Fusion, resolve_fusion
from ffd.methods import create
from ffd.replacement import Replacement
from tests.tiny import random_prompt, tiny_model


def test_replacements_last_as_long_as_the_step_and_no_longer() -> None:
    module, file = torch.nn.Linear(4, 4), types.ModuleType("modeling")
    file.rotate = original = lambda: "own"  # type: ignore[attr-defined]
    x = torch.randn(1, 4)
    own = module(x)
    fusion = Fusion([Replacement(module, "forward", lambda x: 0), Replacement(file, "rotate", lambda: "fused")])
    seen = []

    def broken_step() -> None:
        with fusion.active():
            seen.extend([module(x), file.rotate()])
            raise RuntimeError("broken step")

    with pytest.raises(RuntimeError, match="broken step"):
        broken_step()
    assert seen == [0, "fused"]
    assert "forward" not in vars(module)
    assert file.rotate is original
    assert torch.equal(module(x), own)


def test_an_engine_leaves_nothing_behind_in_the_model() -> None:
    model = tiny_model("llama")
    engine = ffd.Engine(model, create("dense"), capacity=40)
    marks: list[bool] = []
    engine._fusion.replacements.append(
        Replacement(model.lm_head, "forward", lambda x: marks.append(True) or torch.zeros(*x.shape[:-1], 64))
    )
    tokens = engine.generate([random_prompt(20)], 5).tokens[0]
    assert len(marks) == 4  # decode steps; the prefill, which gives the first token, has the model's own head
    assert tokens[1:] == [0] * 4
    assert tokens[0] != 0
    assert all("forward" not in vars(m) for m in model.modules())


def test_a_cpu_keeps_the_models_own_modules() -> None:
    model = tiny_model("llama")
    engine = ffd.Engine(model, create("dense"), capacity=40)
    assert engine.fused == ()
    assert engine.unfused == {"all": "device cpu: kernels need a GPU"}
    with pytest.raises(UnsupportedModelError, match=r"^fuse=True: device cpu: kernels need a GPU; expected auto or F"):
        resolve_fusion(True, model, 1)
    with pytest.raises(ValueError, match=r"^fuse=yes: expected True, False or auto$"):
        resolve_fusion("yes", model, 1)
    for key in ("fuse", "graph"):  # equal to False, and was taken for auto
        with pytest.raises(ValueError, match=f"^{key}=0: expected True, False or auto$"):
            ffd.Engine(model, create("dense"), capacity=40, **{key: 0})


@pytest.mark.parametrize(
    ("dtype", "tokens", "reason"),
    [
        (torch.float32, 1, "dtype torch.float32: kernels are for 16-bit weights"),
        (torch.bfloat16, 17, "17 tokens a step: kernels are for at most 16"),
    ],
)
def test_what_the_kernels_are_not_for(dtype: torch.dtype, tokens: int, reason: str) -> None:
    fusion = fuse(tiny_model("llama").to(dtype), tokens)
    assert fusion.fused == []
    assert fusion.refused == {"all": reason}


def test_modules_are_recognised_by_their_parts() -> None:
    model = tiny_model("qwen3").half()
    layer = model.model.layers[0]
    assert is_norm(layer.input_layernorm)
    assert is_norm(layer.self_attn.q_norm)
    assert not is_norm(torch.nn.LayerNorm(8))
    assert is_swiglu_mlp(layer.mlp)
    assert not is_swiglu_mlp(layer)
    assert is_linear(model.lm_head)

    class Adapted(torch.nn.Linear):
        pass

    assert not is_linear(Adapted(16, 16).half())
    assert not is_linear(torch.nn.Linear(16, 16))  # fp32
    assert not is_linear(torch.nn.Linear(20, 16).half())  # rows that no 16-byte load divides
    layer.mlp.up_proj = Adapted(64, 64).half()
    assert not is_swiglu_mlp(layer.mlp)


def test_a_replacement_may_differ_by_rounding_alone() -> None:
    torch.manual_seed(0)
    want = torch.randn(4, 1, 256).bfloat16()
    ulp = 2.0**-7 * want.float().abs()
    rounded = (want.float() + ulp * (torch.rand(want.shape) - 0.5)).bfloat16()
    assert not torch.equal(rounded, want)
    assert _difference(want, rounded, "Module") is None
    one_wrong = want.clone()
    one_wrong[2, 0, 17] += 1.0
    assert "Module differs from its replacement by 1" in str(_difference(want, one_wrong, "Module"))
    assert "more than rounding" in str(_difference(want, want * 1.04, "Module"))
    assert "returns something else" in str(_difference((want,), want, "Module"))
    assert "not finite" in str(_difference(want / 0, want, "Module"))


def test_the_kernels_compile_for_an_h100() -> None:
    root = Path(__file__).resolve().parent.parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_fused"],
        cwd=root,
        env={**environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("_kernel shared=") == 9
