"""What the kernel runner times: budgets, planted keys, and the grid of the committed record."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments.kernel import baselines
from experiments.kernel.gate import run
from experiments.kernel.grid import BLOCK, COMPLETING, KEPT, WITH_TAIL, Mode, Shape, entries, point
from experiments.kernel.measure import PointRun, missed_target
from experiments.kernel.rows import Refusal, label
from experiments.kernel.session import Session
from experiments.kernel.source import Planting
from experiments.kernel.stages import whole_step
from experiments.kernel.standard import COMPONENT_KEPT, MAIN_LENGTHS, PARTS, standard
from ffd.methods import create, method_class, method_names
from tests.kernel_steps import TINY, passed_with, reference_layer, row


def test_budgets_become_tokens_and_other_methods_keep_their_knobs():
    shape, tail = Shape(1, 10000), 10000 % BLOCK
    (quest,) = entries("quest", {"token_budget": 7000}, shape, (0.2,))
    (topk,) = entries("topk", {"keep_fraction": 0.9}, shape, (0.2,))
    (window,) = entries("streaming", {}, shape, (0.2,))
    (ffd,) = entries("ffd", {"delta": 3.0}, shape, (0.2,))
    whole = 15 * BLOCK + tail  # the hot tokens of the heads that have the fewest
    assert (quest.method.token_budget, topk.method.token_budget, topk.method.keep_fraction) == (whole, whole, None)
    assert (window.method.window, ffd.method.delta) == (2000, 3.0)
    (everything,) = entries("topk", {}, shape, (1.0,))
    assert everything.method.token_budget >= shape.T


def test_a_base_selection_has_room_for_the_target():
    small, large = Shape(1, 16320), Shape(1, 262080)
    budgets = [e.method.token_budget for shape in (small, large) for e in entries("twilight", {}, shape, (0.18, 1.0))]
    assert budgets[0] == create("twilight").token_budget
    assert all(budget >= 0.18 * large.T for budget in budgets[2:])
    assert all(budget >= T for budget, T in zip(budgets[1::2], (small.T, large.T), strict=True))


def test_what_reads_everything_has_one_entry_and_too_small_targets_have_none():
    assert [e.kept for e in entries("kivi", {}, Shape(1, 10000), (0.02, 0.5))] == [1.0]
    assert [e.kept for e in entries("ffd", {}, Shape(1, 4096), (0.02, 0.05, 0.18))] == [0.18]
    assert [e.kept for e in entries("topp", {}, Shape(1, 4096), (None,))] == [None]


@pytest.fixture(scope="module")
def grid():
    """Points of the committed record."""
    return [p for part in PARTS for p in standard(part)]


def test_the_standard_grid_covers_what_the_record_promises(grid):
    lengths = {p.shape.T for p in grid}
    assert any(T % BLOCK == 0 for T in lengths)
    assert any(T % BLOCK for T in lengths)
    assert max(lengths) == 262144
    assert {p.shape.Hq // p.shape.Hkv for p in grid} >= {1, 4, 7, 8}
    assert {p.shape.d for p in grid} == {64, 128}
    assert {p.shape.dtype for p in grid} == {"bfloat16", "float16"}
    assert {p.shape.B for p in grid} == {1, 8}
    assert {m for p in grid for m in p.modes} >= {Mode("eager", "cold"), Mode("graph", "hot")}
    assert {e.kept for p in grid for e in p.entries} == {0.02, 0.05, 0.18, 0.27, 0.273, 1.0}


def test_no_point_is_timed_in_two_parts(grid):
    # `conditions` repeated 18 points of `lengths` and `methods`: two times of one point in one record.
    labels = [
        label(e.label, p.shape, mode, whole_step(e.method, p.shape))
        for p in grid
        for e in p.entries
        for mode in p.modes
    ]
    assert len(labels) == len(set(labels))


@pytest.mark.parametrize("name", sorted(set(method_names()) - {"dense"}))
def test_every_registered_method_is_timed_at_every_length_and_share_that_it_can_have(grid, name):
    def shares(batch: int, tokens: int) -> set[float | None]:
        points = [p for p in grid if p.shape == Shape(batch, tokens)]
        return {e.kept for p in points for e in p.entries if e.method.name == name}

    if name == "component":  # an ablation at one share: the paper's
        assert all(shares(1, T) == {COMPONENT_KEPT} for T in WITH_TAIL)
        return
    for T in WITH_TAIL:
        asked = {1.0} if method_class(name).reads_everything else {k for k in KEPT if k * T >= 2 * BLOCK}
        assert shares(1, T) >= asked
    for T in MAIN_LENGTHS:
        assert shares(8, T) >= ({1.0} if method_class(name).reads_everything else {0.02, 0.18, 1.0})
    assert all(shares(1, T) for T in COMPLETING)


def test_a_point_takes_one_kept_share_after_the_other(grid):
    shares = [[e.kept for e in p.entries] for p in grid]
    assert shares == [sorted(own) for own in shares]


def test_keys_are_planted_once_for_all_methods_at_a_share():
    planting = Planting(TINY, "cpu")
    first = planting.step(0.5)
    assert planting.step(0.5) is first
    assert not torch.equal(planting.step(1.0).keys, first.keys)


SELECTING = sorted(
    name for name in set(method_names()) - {"dense", "component"} if not method_class(name).reads_everything
)


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize(("length", "kept"), [(8128, 0.05), (8192, 0.18), (8128, 1.0)])
def test_every_method_keeps_the_target_whatever_its_rule(name, length, kept):
    # A budget beyond a head's hot tokens went to cold ones, others for each query head: 2 % became 3.
    shape = Shape(1, length, 16, 4, 64, "float16")
    (entry,) = entries(name, {}, shape, (kept,))
    layer, step = reference_layer(name, shape, Planting(shape, "cpu").step(kept), entry.method)
    run(layer, step)
    counts = layer.ledger.counts()
    found = float((counts.union / counts.context).mean())
    assert found == pytest.approx(kept, abs=BLOCK / length / 4 + 0.01 * kept)
    assert missed_target(entry, shape, found) is None


def test_a_share_that_a_method_does_not_keep_is_no_row_of_that_name():
    (entry,) = entries("ffd", {"delta": 14.0}, Shape(1, 65472), (0.18,))
    assert missed_target(entry, Shape(1, 65472), 1.0) == (
        "keeps 1.000 of the tokens with these keys and knobs, expected 0.18"
    )
    assert missed_target(entry, Shape(1, 65472), 0.195) is None
    (captured_keys,) = entries("ffd", {}, Shape(1, 65472), (None,))
    assert missed_target(captured_keys, Shape(1, 65472), 1.0) is None


def test_such_a_share_is_refused_with_what_was_kept(monkeypatch):
    shape = Shape(1, 65472)
    filled = SimpleNamespace(passed=passed_with(kept=0.04))
    monkeypatch.setattr(PointRun, "_fill", lambda *_: filled)
    monkeypatch.setattr(PointRun, "_timed", lambda *_: pytest.fail("timed"))
    dense = row(method="dense", kept_target=1.0, T=shape.T, step=whole_step(create("dense"), shape).split())
    libraries = [Refusal(f"{name} {shape.label}", "not built", wrong=False) for name in baselines.libraries(1)]
    session = Session([dense, *libraries])
    session.dense[dense.label] = dense
    (item,) = PointRun(point(shape, {"twilight": {}}, (0.18,)), 1.0, "cpu", session=session).rows()
    assert (item.label, item.wrong) == (f"twilight kept=0.18 {shape.label}", False)
    assert item.reason.startswith("keeps 0.040 of the tokens")


@pytest.mark.parametrize("kept", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("length", [2000, 2048])
def test_planted_keys_make_ffd_keep_the_target(kept, length):
    shape = replace(TINY, T=length, B=2)
    layer, step = reference_layer("ffd", shape, Planting(shape, "cpu").step(kept))
    run(layer, step)
    counts = layer.ledger.counts()
    assert float((counts.union / counts.context).mean()) == pytest.approx(kept, abs=BLOCK / length / 4 + 1e-9)


def test_planted_blocks_differ_by_at_most_one_between_kv_heads():
    shape = replace(TINY, T=8192, B=2)
    layer, step = reference_layer("ffd", shape, Planting(shape, "cpu").step(0.13))
    run(layer, step)
    union = layer.ledger.counts().union
    assert union.max() - union.min() <= BLOCK
