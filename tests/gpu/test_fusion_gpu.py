"""Fused modules of the decode step on a GPU, against the model's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ffd
from ffd.greedy import GreedyState
from ffd.kernels.linear import linear
from ffd.kernels.rms_norm import rms_norm
from ffd.kernels.rotary import rotary
from ffd.kernels.swiglu_mlp import swiglu
from ffd.methods import create
from tests.greedy_states import ALL_STOPS, BROKEN, assert_broken_rows_end
from tests.tiny import FAMILIES, random_prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

HALF = (torch.float16, torch.bfloat16)
STEP = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("columns", [4096, 896, 4864])
def test_linear_is_the_rounded_product_on_every_run(columns: int, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = normal(tokens, 1, columns, dtype=dtype)
    weights = [normal(n, columns, dtype=dtype) / columns**0.5 for n in (1024, 128, 100)]
    biases = [normal(len(w), dtype=dtype) for w in weights]
    residual = normal(tokens, 1, 1024, dtype=dtype)
    outs = linear(x, weights, biases)
    for out, weight, bias in zip(outs, weights, biases, strict=True):
        want = F.linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(out.double(), want, rtol=STEP[dtype], atol=1e-4)
    (added,) = linear(x, weights[:1], biases[:1], residual)
    assert torch.equal(added, residual + outs[0])
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(outs, linear(x, weights, biases), strict=True))


@pytest.mark.parametrize("dtype", HALF)
def test_the_small_modules_round_as_their_originals(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    torch.manual_seed(0)
    x = normal(5, 1, 4096, dtype=dtype)
    module = LlamaRMSNorm(4096, eps=1e-5).to("cuda", dtype)
    torch.nn.init.normal_(module.weight)
    out = rms_norm(x, module.weight, 1e-5)
    assert (out != module(x)).float().mean() < 0.01  # a square root's last bit
    q, k = (normal(5, 1, heads, 128, dtype=dtype).transpose(1, 2) for heads in (32, 8))
    cos, sin = (normal(5, 1, 128, dtype=dtype) for _ in range(2))
    for got, want in zip(rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert torch.equal(got, want)
    gate, up = (normal(1000, 4096, dtype=dtype) / 64 for _ in range(2))
    exact = [F.linear(x.double(), w.double()).to(dtype) for w in (gate, up)]
    torch.testing.assert_close(swiglu(x, gate, up), F.silu(exact[0]) * exact[1], rtol=3 * STEP[dtype], atol=1e-3)


@pytest.mark.parametrize("min_new_tokens", [0, 2])
def test_greedy_choice_moves_the_state_as_torch_does(min_new_tokens: int) -> None:
    torch.manual_seed(0)
    states = [GreedyState(5, 60, torch.device("cuda"), fused=fused) for fused in (False, True)]
    actives = [torch.ones(5, dtype=torch.int32, device="cuda") for _ in states]
    for state in states:
        state.begin([5, 2, 9, 1, 1], [7, 4000, 11], min_new_tokens)
    for step in range(50):
        logits = torch.randn(5, 128256, device="cuda").bfloat16()
        logits[step % 5, [120000, 70, 2500]] = 9.0  # equals: the first is taken
        if step < 3:
            logits[step, 4000] = 20.0
        for state, active in zip(states, actives, strict=True):
            state.choose(logits, active)
        for name in ("token", "position", "generated", "_new_tokens"):
            assert torch.equal(getattr(states[0], name), getattr(states[1], name)), (name, step)
        assert torch.equal(*actives)
    assert int(actives[1].sum()) == (2 if min_new_tokens == 0 else 4)


@pytest.mark.parametrize("stops", [ALL_STOPS, ALL_STOPS[3:4] + ALL_STOPS[-1:]])
@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("vocabulary", [5001, 128256])
def test_logits_without_a_finite_largest_one_end_a_row(vocabulary: int, value: float, stops: list[int]) -> None:
    assert_broken_rows_end(value, stops, vocabulary, "cuda")


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_model_that_breaks_at_a_token_ends_its_row(fuse: bool, graph: bool) -> None:
    model = tiny_model("llama", head_dim=64).to("cuda", torch.float16)
    prompts = [[1 + i % 7 for i in range(n)] for n in (200, 63)]

    def generate() -> ffd.Generation:
        engine = ffd.Engine(
            model, ffd.FFD(delta=1.0, block_size=64), capacity=300, batch_size=2, fuse=fuse, graph=graph
        )
        return engine.generate(prompts, 24)

    whole = generate()
    assert whole.finite == [True, True]
    token = next(t for t in whole.tokens[0][3:] if t > 7)
    model.model.embed_tokens.weight.data[token] = torch.nan
    broken = generate()
    for before, after, finite in zip(whole.tokens, broken.tokens, broken.finite, strict=True):
        ends = before.index(token) + 1 if token in before[:-1] else None
        assert after == (before if ends is None else [*before[:ends], 0])
        assert finite == (ends is None)
    assert not broken.finite[0]
    assert broken.ledger.complete


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_generates_what_its_own_modules_do(family: str) -> None:
    model = tiny_model(family, head_dim=64).to("cuda", torch.float16)
    prompts = [random_prompt(n, seed=n) for n in (200, 63, 130)]
    ids = torch.tensor([prompts[0]], device="cuda")
    stock = model.generate(ids, max_new_tokens=8, do_sample=False)
    for method in (create("dense"), ffd.FFD(delta=1.0, block_size=64)):
        own, fused = (
            ffd.Engine(model, method, capacity=300, batch_size=3, fuse=fuse, graph=True) for fuse in (False, True)
        )
        assert fused.fused == ("rotary", "rms_norm", "qkv", "o_proj", "mlp", "residual", "lm_head")
        assert own.fused == ()
        want, got = (engine.generate(prompts, 40).tokens for engine in (own, fused))
        same = [
            next((i for i, (a, b) in enumerate(zip(*rows, strict=True)) if a != b), 40)
            for rows in zip(want, got, strict=True)
        ]
        assert sum(same) >= 80, same  # a tie broken the other way may part a row for good
        assert fused.generate(prompts, 40).tokens == got
        eager = ffd.Engine(model, method, capacity=300, batch_size=3, fuse=True, graph=False)
        assert eager.generate(prompts, 40).tokens == got
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), stock)
