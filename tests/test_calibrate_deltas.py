"""Margins per layer and head: where FFD takes them from, and that the storage decodes by them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ffd import FFD, Engine
from ffd.methods import KnobError
from tests.method_harness import CAPACITY, make_case, new_layer, prefill
from tests.tiny import random_prompt, tiny_model

SMALL: dict[str, Any] = {"block_size": 64, "sub_block": 16, "n_sink": 4, "n_local": 16}


def engine(method: FFD) -> Engine:
    return Engine(tiny_model("llama"), method, capacity=256, executor="reference")


def test_every_layer_gets_its_own_row() -> None:
    deltas = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, math.inf]]
    handles = engine(FFD.from_knobs({**SMALL, "deltas": deltas})).cache.handles  # type: ignore[arg-type]
    assert [handle.storage.delta_nats.tolist() for handle in handles] == deltas  # type: ignore[attr-defined]


def test_units_are_those_of_delta() -> None:
    method = FFD(**SMALL, delta_unit="log2", deltas=((2.0, 4.0),))
    assert method.margins(0, 2) == pytest.approx((2 * math.log(2), 4 * math.log(2)))
    assert FFD(delta=3.0, delta_unit="log2").margins(7, 1) == pytest.approx((3 * math.log(2),))


def test_equal_margins_are_the_scalar_and_unequal_ones_select_per_head() -> None:
    case = make_case(tokens=CAPACITY)
    q = case.queries[CAPACITY - 1]

    def selected(**knobs: Any) -> torch.Tensor:
        layer = new_layer(FFD(**SMALL, **knobs), case)
        prefill(layer, case, [CAPACITY])
        return layer.select(q, case.scale).selected

    low, high = selected(delta=0.25), selected(delta=4.0)
    assert low.sum() < high.sum()
    assert torch.equal(selected(delta=9.0, deltas=((0.25,) * 4,)), low)
    mixed = selected(deltas=((0.25, 4.0, 0.25, 4.0),))
    assert torch.equal(mixed[:, ::2], low[:, ::2])
    assert torch.equal(mixed[:, 1::2], high[:, 1::2])


def test_a_model_decodes_by_its_calibrated_margins() -> None:
    prompt = random_prompt(200)
    everything = engine(FFD(delta=math.inf, **SMALL)).generate([prompt], 3).ledger
    mixed = engine(FFD(**SMALL, deltas=((math.inf,) * 4, (0.0,) * 4))).generate([prompt], 3).ledger
    assert mixed.layers[0].union == everything.layers[0].union
    assert sum(mixed.layers[1].union) < sum(everything.layers[1].union)


@pytest.mark.parametrize(
    ("deltas", "message"),
    [
        ([], r"deltas=\[\]: expected one row of numbers"),
        ([1.0, 2.0], r"deltas=1.0: expected one row of numbers"),
        ([[1.0, -2.0]], r"deltas=-2.0: expected one row of numbers"),
        ([["a"]], r"deltas=a: expected one row of numbers"),
    ],
)
def test_bad_margins_are_refused(deltas: Any, message: str) -> None:
    with pytest.raises(KnobError, match=message):
        FFD.from_knobs({"deltas": deltas})


def test_margins_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(KnobError, match="deltas=3 numbers for layer 0: expected one for each of 4 query heads"):
        engine(FFD(deltas=((1.0,) * 3,) * 2))
    with pytest.raises(KnobError, match="deltas=1 rows: expected one for each layer, layer 1 too"):
        engine(FFD(deltas=((1.0,) * 4,)))
