"""The interpreter's comparisons again on a GPU, with thousands of random steps, captured graphs and large offsets."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from ffd.kernels.dense_decode import dense_decode
from ffd.kernels.ffd_append import ffd_append
from ffd.kernels.kv_append import kv_append
from ffd.ledger import Ledger
from ffd.methods import LayerGeometry, RowState
from ffd.methods.dense import Dense
from tests.kernels.oracle import CASES, Case, build, check_appending_step, check_step, next_token

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = [
    Case((1,), group=4, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16).with_knobs(block_size=128),
    Case((1,), group=4, num_kv_heads=2, head_dim=128).with_knobs(block_size=128, sub_block=32),
    Case((1,), group=7, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16).with_knobs(n_sink=100, n_local=50),
    Case((1,), group=3, num_kv_heads=3, head_dim=80, dtype=torch.float32),
    Case((1,), group=1, num_kv_heads=4, head_dim=96).with_knobs(residual="e4m3", levels="cell"),
    Case((1,), group=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16).with_knobs(residual="exact"),
    Case((1,), group=16, num_kv_heads=1, head_dim=64).with_knobs(residual="none", block_size=256),
    Case((1,), group=5, num_kv_heads=2, head_dim=256, dtype=torch.bfloat16).with_knobs(sub_block=16, centre=True),
]
ROUNDS = 200


@pytest.mark.parametrize("name", CASES)
def test_step_equals_the_reference(name: str) -> None:
    layer, q, _, _ = build(CASES[name], "cuda")
    check_step(layer, q)
    check_step(layer, q.flip(0))


@pytest.mark.parametrize("name", [name for name in CASES if "per head" not in name])
def test_tiles_that_all_programs_share_out_are_the_same(name: str) -> None:
    layer, q, _, _ = build(replace(CASES[name], shared=True), "cuda")
    check_step(layer, q)
    check_step(layer, q.flip(0))


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_appends_equals_appending_first(name: str) -> None:
    check_appending_step(CASES[name], "cuda")


@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_random_steps_equal_the_reference(index: int) -> None:
    shape = SHAPES[index]
    draw = random.Random(index)
    block = shape.knobs["block_size"]
    kept = []
    for round_ in range(ROUNDS):
        near_boundary = draw.randrange(1, 12) * block + draw.randrange(-2, 3)
        lengths = [max(1, draw.choice([near_boundary, draw.randrange(1, 1500)])) for _ in range(3)]
        capacity = max(1600, *lengths) + 1
        case = Case(
            tuple(lengths), shape.group, shape.num_kv_heads, shape.head_dim, capacity, shape.dtype, round_,
            draw.choice([0.5, 1.0, 2.0, 3.0]), {**shape.knobs, "delta": draw.choice([0.0, 0.5, 1.0, 2.0, 4.0, 7.0])},
            shared=round_ % 2 == 0,
        )  # fmt: skip
        layer, q, _, _ = build(case, "cuda")
        kept.append(check_step(layer, q)["kept"])
        token = next_token(layer)
        layer.rows.lengths.add_(1)
        check_step(layer, q, token)
    assert min(kept) < 0.2
    assert max(kept) > 0.8


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("knobs", [{"block_size": 64}, {"block_size": 128, "sub_block": 32, "centre": True}])
def test_one_captured_step_serves_growing_lengths(knobs: dict[str, object], shared: bool) -> None:
    case = Case((60, 100), num_kv_heads=2, capacity=400, knobs={"delta": 2.0, **knobs}, shared=shared)
    captured, q, _, _ = build(case, "cuda")
    eager, _, _, _ = build(case, "cuda")
    token = torch.zeros(2, 2, 2, 1, 64, dtype=torch.float16, device="cuda")
    query = q.clone()

    def step(layer: object) -> torch.Tensor:
        layer.rows.lengths.add_(1)  # type: ignore[attr-defined]
        return layer.step(token[0], token[1], query, 0.125)  # type: ignore[attr-defined,no-any-return]

    before = {name: value.clone() for name, value in vars(captured).items() if isinstance(value, torch.Tensor)}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(captured)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(captured)
    for name, value in before.items():  # warm-up and capture wrote a token; start again
        getattr(captured, name).copy_(value)
    captured.rows.lengths.copy_(torch.tensor(case.lengths))
    captured.ledger.reset()
    generator = torch.Generator("cuda").manual_seed(5)
    for _ in range(200):
        token.normal_(generator=generator)
        query.normal_(generator=generator)
        graph.replay()
        assert torch.equal(out, step(eager))
    assert torch.equal(captured.ledger.counters, eager.ledger.counters)
    check_step(captured, query)


def test_offsets_beyond_32_bits() -> None:
    case = Case((700, 333), num_kv_heads=8, head_dim=128, capacity=1_200_000).with_knobs(block_size=128)
    layer, q, keys, values = build(case, "cuda")
    assert layer.values.numel() > 1 << 31
    check_step(layer, q)
    for _ in range(70):
        layer.rows.lengths.add_(1)
        ffd_append(layer, keys[:, :, :1], values[:, :, :1])
    check_step(layer, q)
    assert torch.equal(layer.values[1, 7, 402], values[1, 7, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 80), (4, 128), (7, 96), (8, 256), (16, 64)])
def test_dense_equals_the_reference(dtype: torch.dtype, group: int, head_dim: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    rows = RowState.allocate(3, "cuda")
    geometry = LayerGeometry(3, 2 * group, 2, head_dim, 3000, dtype, torch.device("cuda"))
    layer = Dense().new_layer(geometry, rows, "reference")
    q = torch.randn(3, 2 * group, head_dim, generator=generator, device="cuda").to(dtype)
    layer.keys.normal_(generator=generator)
    layer.values.normal_(generator=generator)
    clean = layer.keys.clone(), layer.values.clone()
    ledger = Ledger(3, 2, 2 * group, torch.device("cuda"), rows.active)
    for lengths in ((1, 2, 3), (64, 65, 63), (2999, 3000, 17), (1000, 2048, 129)):
        rows.lengths.copy_(torch.tensor(lengths))
        for buffer, content in zip((layer.keys, layer.values), clean, strict=True):
            buffer.copy_(content)
            for row, length in enumerate(lengths):
                buffer[row, :, length:] = torch.nan
        kv_append(clean[0][:, :, :1], clean[1][:, :, :1], layer.keys, layer.values, rows.lengths)
        want, _ = layer.decode_reference(q, 0.125)
        out = dense_decode(q, layer.keys, layer.values, rows.lengths, 0.125, ledger)
        tolerance = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
    assert torch.equal(ledger.counters, layer.ledger.counters)
