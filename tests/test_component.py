"""The component grid: its corners are FFD and the exact oracles, and its thumbnails are FFD's at other widths."""

from __future__ import annotations

import math

import pytest
import torch

from ffd.methods import KnobError, create
from ffd.methods.component import BITS, Component
from ffd.methods.ffd import FFD
from ffd.minmax import unpack_planes
from ffd.quantization import odd_levels, quantize_blocks
from ffd.thumbnails import quantize_thumbnails
from tests.method_harness import append, filled, make_case, new_layer, prefill

BLOCKS = {"block_size": 64, "sub_block": 16, "n_sink": 4, "n_local": 20}
LENGTHS = (61, 128, 150)


def test_the_fused_two_bit_margin_is_ffd() -> None:
    layer = new_layer(create("component", {**BLOCKS, "delta": 1.5}), make_case())
    assert layer.method == FFD(delta=1.5, **BLOCKS)  # type: ignore[attr-defined]


@pytest.mark.parametrize("delta", [0.0, 0.5, 2.0])
def test_the_decoupled_two_bit_margin_keeps_what_ffd_keeps(delta: float) -> None:
    case = make_case(batch=len(LENGTHS), group=3, d=64, seed=4)
    ffd, q = filled(FFD(delta=delta, residual="exact", **BLOCKS), case, LENGTHS)
    apart, _ = filled(create("component", {**BLOCKS, "delta": delta, "path": "decoupled"}), case, LENGTHS)
    expected, got = ffd.select(q, case.scale), apart.select(q, case.scale)
    assert torch.equal(got.selected, expected.selected)
    assert torch.equal(got.scanned, expected.scanned)
    assert 0.05 < got.selected.float().mean() < 0.9
    torch.testing.assert_close(got.pseudo_max, expected.pseudo_max)
    torch.testing.assert_close(got.estimate, expected.estimate, equal_nan=True)


@pytest.mark.parametrize("rule", [{"token_budget": 48}, {"p": 0.6}])
def test_sixteen_bits_are_the_exact_oracle(rule: dict[str, float]) -> None:
    case = make_case(batch=3, group=3)
    name = "topk" if "token_budget" in rule else "topp"
    units = {"granularity": "block", "unit_size": 64, "select_per": "group", "force_local": True}
    oracle, q = filled(create(name, {**rule, **units}), case, LENGTHS)
    apart, _ = filled(create("component", {**rule, "bits": 16, "select": name, "block_size": 64}), case, LENGTHS)
    expected, got = oracle.select(q, case.scale), apart.select(q, case.scale)
    assert torch.equal(got.selected, expected.selected)
    assert torch.equal(got.attended, expected.attended)
    assert torch.equal(got.scanned, expected.scanned)


def test_the_exact_margin_differs_from_the_oracle_by_the_pseudo_maximum_alone() -> None:
    case = make_case()
    knobs = {"block_size": 64, "bits": 16, "delta": 1.0, "n_local": 150}
    apart, q = filled(create("component", knobs), case, [150])  # every token is near
    units = {"granularity": "block", "unit_size": 64, "select_per": "group", "force_local": True}
    oracle, _ = filled(create("topdelta", {"delta": 1.0, **units}), case, [150])
    assert torch.equal(apart.select(q, case.scale).selected, oracle.select(q, case.scale).selected)


def test_a_budget_is_the_groups_and_the_tail_comes_on_top() -> None:
    case = make_case(batch=3, group=3)
    knobs = {**BLOCKS, "select": "topk", "token_budget": 32, "path": "decoupled"}
    layer, q = filled(create("component", knobs), case, LENGTHS)
    selection = layer.select(q, case.scale)
    assert torch.equal(selection.selected, selection.attended)
    for row, length in enumerate(LENGTHS):
        tail = (length - 1) // 64 * 64
        assert selection.attended[row, :, tail:length].all()
        assert (selection.attended[row, :, :tail].sum(dim=-1) <= 32).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_levels_are_odd_half_steps_within_half_a_step(bits: int) -> None:
    keys = torch.randn(2, 3, 64, 32, generator=torch.Generator().manual_seed(1)).half()
    keys[0, 0, :, 5] = 0.0
    codes, half_step = quantize_thumbnails(keys, bits)
    h = half_step.float().unsqueeze(-2)
    restored = (2.0 * unpack_planes(codes, bits).float() - (2**bits - 1)) * h
    assert ((restored - keys.float()).abs() <= h * 1.001 + 1e-3 * keys.float().abs().amax(-2, keepdim=True)).all()
    assert (restored[0, 0, :, 5] == 0).all()
    if bits == 2:
        published = quantize_blocks(keys, "edge", "none")
        assert torch.equal(restored, odd_levels(published.codes) * h)
        assert torch.equal(half_step, published.half_step)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_block_is_quantised_by_the_step_after_the_one_that_fills_it(bits: int) -> None:
    case = make_case(batch=2)
    layer = new_layer(create("component", {**BLOCKS, "bits": bits, "path": "decoupled"}), case)
    prefill(layer, case, [63, 130])
    q = append(layer, case)  # row 0 fills its first block
    assert layer.select(q, case.scale).scanned.tolist() == [0, 128]
    q = append(layer, case)
    assert layer.select(q, case.scale).scanned.tolist() == [64, 128]
    codes, half_step = quantize_thumbnails(case.keys[:1, :, :64], bits)
    assert torch.equal(layer.thumbnails.codes[:1, :, :64], codes)  # type: ignore[attr-defined]
    assert torch.equal(layer.thumbnails.half_step[:1, :, 0], half_step)  # type: ignore[attr-defined]


def test_fewer_bits_read_less_and_estimate_worse() -> None:
    case = make_case(d=64)
    errors, scans = [], []
    for bits in BITS:
        layer, q = filled(create("component", {**BLOCKS, "bits": bits, "path": "decoupled"}), case, [150])
        selection = layer.select(q, case.scale)
        errors.append(float((selection.estimate - selection.scores)[..., :128].square().mean().sqrt()))
        layer.decode(q, case.scale)
        scans.append(float(layer.bytes_read(layer.ledger.counts())["scan"].mean()))
    assert errors[0] > 3 * errors[1] > 30 * errors[2] > errors[3] == 0.0
    half_steps = 128 * 64 * 2 / 64
    assert scans[:3] == [128 * 64 * bits / 8 + half_steps for bits in (2, 4, 8)]
    assert scans[3] == 150 * 64 * 4  # the keys themselves, float32 here, the tail's too


@pytest.mark.parametrize(
    ("knob", "value"),
    [("bits", 3), ("select", "sort"), ("path", "both"), ("token_budget", 0), ("p", 0.0), ("delta", -1.0),
     ("block_size", 100), ("sub_block", 24), ("n_local", 0)],
)  # fmt: skip
def test_a_bad_knob_is_named_with_what_is_accepted(knob: str, value: object) -> None:
    with pytest.raises(KnobError, match=rf"{knob}={value}: expected "):
        create("component", {knob: value})


def test_the_knob_that_decides_the_cost_is_the_rules() -> None:
    found = {select: Component(select=select).cost_knob.name for select in ("topdelta", "topk", "topp")}
    assert found == {"topdelta": "delta", "topk": "token_budget", "topp": "p"}
    assert math.isinf(Component(select="topk").cost_knob.high)
