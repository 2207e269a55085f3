from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ffd.kernels.ffd_append import ffd_append
from ffd.kernels.ffd_decode import ffd_decode
from tests.kernels.oracle import CASES, Case, build, check_appending_step, check_step, near_only


@pytest.mark.parametrize("name", CASES)
def test_step_equals_the_reference(name: str) -> None:
    layer, q, _, _ = build(CASES[name])
    check_step(layer, q)
    check_step(layer, q.flip(0))  # scratch memory and counters serve a second step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pseudo_max", ["refined", "scan"])
def test_an_e4m3_residual_is_multiplied_with_the_query_itself(dtype: torch.dtype, pseudo_max: str) -> None:
    """The reference multiplied it with the scan's fp16 operand: 1e-4 off, which 16-bit outputs do not show."""
    knobs = {"delta": 2.0, "block_size": 64, "residual": "e4m3", "pseudo_max": pseudo_max}
    for seed in range(2):
        layer, q, _, _ = build(Case((200, 90), dtype=dtype, seed=seed, knobs=knobs))
        assert check_step(layer, q)["lse_error"] < 5e-6


@pytest.mark.parametrize("name", [name for name in CASES if "per head" not in name])
def test_tiles_that_all_programs_share_out_are_the_same(name: str) -> None:
    """The schedule for much work, on little: programs go from one head's tiles to the next's."""
    layer, q, _, _ = build(replace(CASES[name], shared=True))
    check_step(layer, q)
    check_step(layer, q.flip(0))


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_appends_equals_appending_first(name: str) -> None:
    """The token rides in the scan's launch: whatever the slot, the step and the storage are the same."""
    check_appending_step(CASES[name])


def test_cases_keep_some_and_drop_some() -> None:
    """The comparison above would be hollow if every case kept all or nothing."""
    layer, q, _, _ = build(CASES["ragged"])
    assert 0.2 < check_step(layer, q)["kept"] < 0.9


def test_cases_hold_sub_blocks_that_only_a_refined_near_score_keeps() -> None:
    """Else the near test of the kernel would be compared with nothing."""
    found = {name: near_only(*build(CASES[name])[:2]) for name in ("ragged", "sub 16", "per head sub 16", "windows")}
    assert min(found["per head sub 16"], sum(found.values()) - found["per head sub 16"]) > 0, found


@pytest.mark.parametrize("residual", ["int8", "e4m3", "exact", "none"])
@pytest.mark.parametrize("levels", ["edge", "cell"])
def test_appending_equals_quantising_at_once(residual: str, levels: str) -> None:
    knobs = {"delta": 2.0, "block_size": 64, "residual": residual, "levels": levels}
    case = Case((126, 62), num_kv_heads=2, head_dim=80, capacity=192, knobs=knobs)
    layer, q, keys, values = build(case)
    generator = torch.Generator().manual_seed(3)
    b, hkv, d = 2, 2, 80
    more = torch.randn(2, b, hkv, 4, d, generator=generator).to(case.dtype)
    more[:, :, :, :, :3] = 0.0  # channels whose amplitude is zero or comes from the prompt alone
    for step in range(4):
        layer.rows.lengths.add_(1)
        ffd_append(layer, more[0, :, :, step : step + 1], more[1, :, :, step : step + 1])
    check_step(layer, q)
    for row, length in enumerate(case.lengths):
        joined = torch.cat([keys[row : row + 1, :, :length], more[0, row : row + 1]], dim=2)
        stored = torch.cat([values[row : row + 1, :, :length], more[1, row : row + 1]], dim=2)
        alone, _, _, _ = build(Case((length + 4,), num_kv_heads=2, head_dim=80, knobs=knobs))
        alone.prefill(joined, stored)
        whole = (length + 4) // 64
        assert whole > 0
        tokens = whole * 64
        assert torch.equal(layer.codes[row, :, :tokens], alone.codes[0, :, :tokens])
        assert torch.equal(layer.half_step[row, :, :whole], alone.half_step[0, :, :whole])
        assert torch.equal(layer.values[row, :, : length + 4], alone.values[0, :, : length + 4])
        tail = length + 4 - tokens
        assert torch.equal(layer.tail[row, :, :tail], alone.tail[0, :, :tail])
        if alone.residual is not None and layer.residual is not None:
            view = torch.uint8 if residual == "e4m3" else alone.residual.dtype
            assert torch.equal(layer.residual[row, :, :tokens].view(view), alone.residual[0, :, :tokens].view(view))


def test_centred_append_subtracts_the_prompt_mean() -> None:
    case = Case((63,), capacity=128).with_knobs(centre=True)
    layer, q, _, _ = build(case)
    key = torch.randn(1, 1, 1, 64).half()
    layer.rows.lengths.add_(1)
    ffd_append(layer, key, key)
    twin, _, _, _ = build(case)
    twin.executor = "reference"
    twin.rows.lengths.add_(1)
    twin.append(key, key)
    assert torch.equal(layer.codes[:, :, :64], twin.codes[:, :, :64])
    assert layer.residual is not None
    assert twin.residual is not None
    assert torch.equal(layer.residual[:, :, :64], twin.residual[:, :, :64])
    check_step(layer, q)


def test_margins_are_read_per_head_from_the_device() -> None:
    layer, q, _, _ = build(Case((260,), group=2))
    layer.delta_nats.copy_(torch.tensor([0.0, torch.inf]))
    _, kept = ffd_decode(layer, q, 64**-0.5, return_kept=True)
    assert kept[0, 0, :4, 1].all()
    assert not kept[0, 0, :4, 0].all()
    check_step(layer, q)
