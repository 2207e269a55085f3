"""Fused modules of the decode step against the modules they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ffd
from ffd.cache import UnsupportedModelError
from ffd.greedy import GreedyState
from ffd.kernels.linear import linear
from ffd.kernels.rms_norm import rms_norm
from ffd.kernels.rotary import rotary
from ffd.kernels.swiglu_mlp import swiglu
from ffd.methods import create
from tests.greedy_states import ALL_STOPS, BROKEN, assert_broken_rows_end
from tests.tiny import FAMILIES, random_prompt, tiny_model

# The interpreter truncates where a GPU rounds to the nearest bf16; bits are compared in fp16 alone.
HALF = (torch.float16, torch.bfloat16)
STEP = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def close(got: Tensor, want: Tensor) -> None:
    """Equal up to one rounding of the last place and sums in another order."""
    torch.testing.assert_close(got, want, rtol=STEP[got.dtype], atol=2e-4)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 64), (3, 144), (16, 320)])
def test_linear_layers_in_one_launch(tokens: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, 1, columns).to(dtype)
    weights = [torch.randn(n, columns).to(dtype) / columns**0.5 for n in (96, 40, 33)]
    biases = [torch.randn(len(w)).to(dtype) for w in weights]
    for count in (1, 2, 3):
        for bias in (None, biases):
            outs = linear(x, weights[:count], bias and bias[:count])
            assert len(outs) == count
            for i, out in enumerate(outs):
                assert out.shape == (tokens, 1, len(weights[i]))
                close(out, exact_linear(x, weights[i], bias and bias[i]))


def test_linear_adds_the_residual_after_rounding() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 1, 192).half(), torch.randn(80, 192).half() / 14
    residual = 100 * torch.randn(2, 1, 80).half()
    (plain,) = linear(x, [weight])
    (out,) = linear(x, [weight], residual=residual)
    assert torch.equal(out, residual + plain)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("biased", [False, True])
def test_swiglu(biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 1, 144).to(dtype)
    gate, up = (torch.randn(72, 144).to(dtype) / 12 for _ in range(2))
    biases = [torch.randn(72).to(dtype) if biased else None for _ in range(2)]
    out = swiglu(x, gate, up, *biases)
    want = F.silu(exact_linear(x, gate, biases[0])) * exact_linear(x, up, biases[1])
    torch.testing.assert_close(out, want, rtol=3 * STEP[dtype], atol=STEP[dtype] / 8)


@pytest.mark.parametrize("shape", [(2, 1, 80), (2, 1, 3, 64)])
def test_rms_norm_rounds_as_the_module(shape: tuple[int, ...]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    module = LlamaRMSNorm(shape[-1], eps=1e-5).half()
    module.weight.data.normal_()
    x = (3 * torch.randn(shape)).half()
    out = rms_norm(x, module.weight, 1e-5)
    assert (out != module(x)).float().mean() < 0.01  # a square root's last bit
    torch.testing.assert_close(out, module(x), rtol=STEP[torch.float16], atol=0)


@pytest.mark.parametrize(("angle_rows", "d"), [(1, 64), (3, 80)])
def test_rotary_equals_the_function_bit_for_bit(angle_rows: int, d: int) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    q, k = (torch.randn(3, 1, heads, d).half().transpose(1, 2) for heads in (6, 2))
    cos, sin = (torch.randn(angle_rows, 1, d).half() for _ in range(2))
    for got, want in zip(rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, want)


@pytest.mark.parametrize("min_new_tokens", [0, 2])
def test_greedy_choice_moves_the_state_as_torch_does(min_new_tokens: int) -> None:
    torch.manual_seed(0)
    states = [GreedyState(3, 6, torch.device("cpu"), fused=fused) for fused in (False, True)]
    actives = [torch.ones(3, dtype=torch.int32) for _ in states]
    for state in states:
        state.begin([5, 2, 9], [7, 4000, 11], min_new_tokens)
    for step in range(4):
        logits = torch.randn(3, 5001).bfloat16()
        logits[0, 4000] = logits[2, 11 if step else 3] = 20.0
        logits[1, [4999, 70, 2500]] = 9.0  # equals: the first is taken
        for state, active in zip(states, actives, strict=True):
            state.choose(logits, active)
        for name in ("token", "position", "generated", "_new_tokens"):
            assert torch.equal(getattr(states[0], name), getattr(states[1], name)), name
        assert torch.equal(*actives)
        assert states[1].token[1] == 70
    assert actives[1].tolist() == [0, 1, 0]


@pytest.mark.parametrize("stops", [ALL_STOPS, ALL_STOPS[3:4] + ALL_STOPS[-1:]])
@pytest.mark.parametrize("value", BROKEN)
def test_logits_without_a_finite_largest_one_end_a_row(value: float, stops: list[int]) -> None:
    """Once the last token of the vocabulary was chosen, or NaN's own place."""
    assert_broken_rows_end(value, stops, 5001, "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_generates_what_its_own_modules_do(family: str) -> None:
    model = tiny_model(family).half()
    prompts = [random_prompt(n, seed=n) for n in (20, 9)]
    tokens = []
    logits: list[list[Tensor]] = []
    for fuse in (False, True):
        engine = ffd.Engine(model, create("dense"), capacity=40, batch_size=2, fuse=fuse)
        seen: list[Tensor] = []
        choose = engine._choose
        engine._choose = lambda x, seen=seen, choose=choose: (seen.append(x.clone()), choose(x))[1]
        tokens.append(engine.generate(prompts, 5).tokens)
        logits.append(seen)
        assert engine.fused == (("rotary", "rms_norm", "qkv", "o_proj", "mlp", "residual", "lm_head") if fuse else ())
        assert not (fuse and engine.unfused)
    assert tokens[0] == tokens[1]
    for own, fused in zip(*logits, strict=True):
        torch.testing.assert_close(fused, own, rtol=0.02, atol=0.02 * float(own.abs().max()))
    assert not all(torch.equal(a, b) for a, b in zip(*logits, strict=True))  # the kernels did run


def test_a_model_with_another_rule_keeps_its_modules_and_says_why() -> None:
    model = tiny_model("llama", hidden_act="gelu").half()
    engine_fusion = ffd.Engine(model, create("dense"), capacity=8, fuse=False)
    assert engine_fusion.fused == ()
    with pytest.raises(UnsupportedModelError, match=r"^fuse=True: mlp: LlamaMLP is no SwiGLU"):
        ffd.Engine(model, create("dense"), capacity=8, fuse=True)
