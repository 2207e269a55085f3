"""Fused paths of every method on a GPU, generated from the registry: long rows, 16-bit dtypes, captured graphs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ffd import Engine
from ffd.kernels.thresholds import bisect_top_p, radix_top_k
from ffd.methods import Method, component, create, method_names
from ffd.selection import top_k, top_p_threshold
from tests.method_checks import check_appends, check_executors, check_ledger
from tests.method_harness import filled, make_case, method_of
from tests.tiny import random_prompt, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NAMES = method_names()
GRID = [
    {"bits": bits, "select": select, "path": path}
    for bits, select, path in itertools.product(component.BITS, component.COST_KNOBS, component.PATHS)
    if (bits, select, path) != (2, "topdelta", "fused")  # FFD, which has tests of its own
]
LONG = [
    ("quest", {}),
    ("quest", {"last_page": "eval", "select_per": "group", "token_budget": 512}),
    ("twilight", {"token_budget": 2048}),
    ("twilight", {"base": "all", "p": 0.95, "select_per": "group"}),
    ("kivi", {}),
    ("kivi", {"bits": 4}),
    ("topk", {"keep_fraction": 0.273}),
    ("topk", {"granularity": "block", "select_per": "group"}),
    ("topp", {"p": 0.9}),
    ("topp", {"p": 0.9, "granularity": "page", "select_per": "group"}),
    ("topdelta", {"delta": 2.0}),
    ("topdelta", {"delta": 2.0, "granularity": "block", "select_per": "group", "force_local": True}),
    ("sink_threshold", {"delta": 1.0}),
    ("component", {"delta": 2.0}),
    *(("component", {**knobs, "delta": 2.0, "token_budget": 2048, "p": 0.8}) for knobs in GRID),
    ("streaming", {}),
    ("ffd", {"delta": 2.0}),
    ("dense", {}),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("group", "d"), [(1, 64), (3, 80), (4, 128), (7, 64), (8, 96), (2, 256)])
def test_the_executors_agree(name: str, group: int, d: int) -> None:
    check_executors(method_of(name), make_case(batch=3, group=group, d=d, seed=group).to("cuda"), 1e-4)


@pytest.mark.parametrize("knobs", GRID, ids=str)
def test_the_executors_agree_at_every_point_of_the_grid(knobs: dict[str, object]) -> None:
    small = {"delta": 0.8, "token_budget": 32, "p": 0.7, "block_size": 64, "sub_block": 16, "n_sink": 4, "n_local": 20}
    for group, d in ((1, 64), (3, 80), (8, 128)):
        check_executors(create("component", {**small, **knobs}), make_case(3, 2, group, d, seed=group).to("cuda"), 1e-4)
    check_appends(create("component", {**small, **knobs}), "cuda")


@pytest.mark.parametrize("name", NAMES)
def test_the_executors_agree_after_appends_across_boundaries(name: str) -> None:
    check_appends(method_of(name), "cuda")


@pytest.mark.parametrize("name", NAMES)
def test_the_fused_ledger_equals_a_recount_of_the_reference_selection(name: str) -> None:
    check_ledger(method_of(name), "fused", "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "knobs"), LONG)
def test_long_rows_in_16_bits(name: str, knobs: dict[str, object], dtype: torch.dtype) -> None:
    """Scores near a threshold may round to either side in 16 bits: counts agree within 1 %, outputs within 2 %."""
    method: Method = create(name, knobs)
    lengths = (9001, 12288, 12001)
    case = make_case(batch=3, group=4, d=128, tokens=12288).to("cuda")
    options = {"capacity": 12288, "dtype": dtype}
    reference, q = filled(method, case, lengths, **options)
    fused, _ = filled(method, case, lengths, executor="fused", **options)
    expected, got = reference.decode(q, case.scale).float(), fused.decode(q, case.scale).float()
    assert (got - expected).norm() <= 0.02 * expected.norm()
    for field, value in vars(reference.ledger.counts()).items():
        torch.testing.assert_close(getattr(fused.ledger.counts(), field), value, rtol=0.01, atol=2.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_generates_the_eager_tokens(name: str) -> None:
    """Two engines, 300 steps: over page, residual and block boundaries, with unequal prompts in a batch."""
    prompts = [random_prompt(n, seed=n) for n in (41, 130)]
    generations = []
    for graph in (True, False):
        model = tiny_model("llama").to("cuda")
        engine = Engine(model, method_of(name), capacity=512, batch_size=2, graph=graph)
        first = engine.generate(prompts, 300)
        again = engine.generate(prompts, 300)
        assert again.tokens == first.tokens, "a second sample must not see the first one's state"
        assert first.ledger.complete
        generations.append(first)
    captured, eager = generations
    assert captured.tokens == eager.tokens
    assert captured.ledger.totals() == eager.ledger.totals()


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros"])
def test_radix_selection_of_long_rows(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(2, 8, 262_144, generator=generator)
    if kind == "ties":
        scores = (scores * 3).round()
    elif kind == "zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    scores = scores.cuda()
    count = torch.tensor([262_144, 100_003], dtype=torch.int32, device="cuda")
    k = torch.tensor([4096, 70_001], dtype=torch.int32, device="cuda")
    threshold = radix_top_k(scores, count, k)
    assert threshold.tie_end is not None
    index = torch.arange(scores.shape[-1], device="cuda")
    seen = index < count[:, None, None]
    tied = (scores == threshold.value[..., None]) & (index < threshold.tie_end[..., None])
    kept = ((scores > threshold.value[..., None]) | tied) & seen
    assert torch.equal(kept, top_k(scores.masked_fill(~seen, -math.inf), k))


@pytest.mark.parametrize("p", [0.5, 0.85, 0.99])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_bisection_of_long_rows(p: float, spread: float) -> None:
    """fp32 sums of 2**18 weights differ in their order: the masses must agree, not each last token."""
    generator = torch.Generator().manual_seed(4)
    scores = (torch.randn(1, 8, 262_144, generator=generator) * spread).cuda()
    count = torch.tensor([262_144], dtype=torch.int32, device="cuda")
    value = bisect_top_p(scores, count, scores.amax(-1, keepdim=True), p).value
    natural = scores * math.log(2)
    expected = natural >= top_p_threshold(natural, p)[..., None]
    kept = scores >= value[..., None]
    mass = torch.softmax(natural.double(), dim=-1)
    torch.testing.assert_close((mass * kept).sum(-1), (mass * expected).sum(-1), rtol=0, atol=1e-4)
    assert ((mass * kept).sum(-1) >= p - 1e-4).all()
