"""What every decode method must satisfy, generated from the registry: a new method brings its own tests."""

from __future__ import annotations

import math

import pytest
import torch

from ffd import Engine
from ffd.methods import method_class, method_names
from ffd.oracle import ExactScoreMethod
from tests.method_checks import check_ledger
from tests.method_harness import CAPACITY, append, filled, make_case, method_of, new_layer, prefill
from tests.tiny import random_prompt, tiny_model

NAMES = method_names()
SELECTING = [n for n in NAMES if not method_class(n).reads_everything]
ORACLES = [n for n in NAMES if issubclass(method_class(n), ExactScoreMethod)]
LENGTHS = (61, 128, 150)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("group", "d"), [(1, 64), (3, 80), (7, 32)])
def test_keeping_everything_equals_dense(name: str, group: int, d: int) -> None:
    case = make_case(batch=3, group=group, d=d)
    layer, q = filled(method_of(name, "keep_all_knobs"), case, LENGTHS)
    dense, _ = filled(method_of("dense"), case, LENGTHS)
    torch.testing.assert_close(layer.decode(q, case.scale), dense.decode(q, case.scale), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SELECTING)
def test_the_small_knobs_select_something_and_not_everything(name: str) -> None:
    case = make_case(batch=3)
    layer, q = filled(method_of(name), case, LENGTHS)
    union = layer.select(q, case.scale).union(2).sum(dim=-1)
    context = torch.tensor(LENGTHS)[:, None]
    assert (union > 0).all()
    assert (union < context).any()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_row_decodes_as_if_alone(name: str) -> None:
    case = make_case(batch=3)
    layer, q = filled(method_of(name), case, LENGTHS)
    together = layer.select(q, case.scale)
    out = layer.decode(q, case.scale)
    for row, length in enumerate(LENGTHS):
        single, single_q = filled(method_of(name), case.rows(row), [length])
        alone = single.select(single_q, case.scale)
        assert torch.equal(alone.attended[0], together.attended[row, :, :length])
        assert not together.attended[row, :, length:].any()
        torch.testing.assert_close(single.decode(single_q, case.scale)[0], out[row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_permuting_kv_heads_permutes_the_output(name: str) -> None:
    case = make_case(kv_heads=3, group=2)
    order = torch.tensor([2, 0, 1])
    swapped = make_case(kv_heads=3, group=2)
    swapped.keys, swapped.values = case.keys[:, order], case.values[:, order]
    swapped.queries = case.queries.unflatten(2, (3, 2))[:, :, order].flatten(2, 3)
    outputs = []
    for one in (case, swapped):
        layer, q = filled(method_of(name), one, [150])
        outputs.append(layer.decode(q, case.scale))
    expected = outputs[0].unflatten(1, (3, 2))[:, order].flatten(1, 2)
    torch.testing.assert_close(outputs[1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_depends_on_the_tokens_and_not_on_how_they_came(name: str) -> None:
    """Appending one by one over page, block and residual boundaries equals prefilling, at every length."""
    case = make_case()
    grown = new_layer(method_of(name), case)
    prefill(grown, case, [3])
    for length in range(4, 140):
        q = append(grown, case)
        if length % 16 in (0, 1) or length > 124:
            fresh, _ = filled(method_of(name), case, [length])
            expected, got = fresh.select(q, case.scale), grown.select(q, case.scale)
            assert torch.equal(expected.attended, got.attended), f"length {length}"
            torch.testing.assert_close(grown.decode(q, case.scale), fresh.decode(q, case.scale), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ORACLES)
def test_an_oracle_recalls_its_own_true_top(name: str) -> None:
    case = make_case(batch=2)
    layer, q = filled(method_of(name), case, [150, 97])
    selection = layer.select(q, case.scale)
    for row, length in enumerate((150, 97)):
        keys = case.keys[row, :, :length].repeat_interleave(2, dim=0)
        probability = torch.softmax((keys @ q[row][..., None]).squeeze(-1) * case.scale, dim=-1)
        for head in range(4):
            kept = selection.selected[row, head, :length]
            top = probability[head].topk(int(kept.sum())).indices
            assert kept[top].all()


@pytest.mark.parametrize("name", NAMES)
def test_the_ledger_equals_a_recount_of_the_reference_selection(name: str) -> None:
    check_ledger(method_of(name), "reference")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_generates_the_same_tokens_in_a_padded_batch_and_alone(name: str, family: str) -> None:
    model = tiny_model(family)
    prompts = [random_prompt(n, seed=n) for n in (41, 90)]
    method = method_of(name)
    batch = Engine(model, method, capacity=CAPACITY, batch_size=2).generate(prompts, 12)
    assert batch.ledger.complete
    for row, prompt in enumerate(prompts):
        alone = Engine(model, method, capacity=CAPACITY).generate([prompt], 12)
        assert alone.tokens[0] == batch.tokens[row]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_torchs_default_dtype_decides_nothing(name: str, default: torch.dtype) -> None:
    """Scripts set it to load a model in 16 bits. Once FFD raised then, and KIVI's restored keys were rounded."""
    model, prompt = tiny_model("llama").bfloat16(), [random_prompt(140, 1)]

    def generate() -> list[list[int]]:
        return Engine(model, method_of(name), capacity=CAPACITY, executor="reference").generate(prompt, 12).tokens

    expected, before = generate(), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert generate() == expected
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", NAMES)
def test_keeping_everything_generates_the_dense_tokens(name: str) -> None:
    model = tiny_model("llama", layers=3)
    prompt = [random_prompt(120)]
    dense = Engine(model, method_of("dense"), capacity=CAPACITY).generate(prompt, 24)
    kept = Engine(model, method_of(name, "keep_all_knobs"), capacity=CAPACITY).generate(prompt, 24)
    assert kept.tokens == dense.tokens
    if dense.ledger.layers[0].steps:
        assert math.isclose(kept.ledger.layers[0].union[0], dense.ledger.layers[0].union[0])
