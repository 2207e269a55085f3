"""Each rule against a plain restatement of its definition, on stored keys and single heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
import yaml

from ffd import Engine
from ffd.methods import KnobError, create, method_class, method_names, require
from ffd.minmax import dequantize_minmax, pack_planes, quantize_minmax, unpack_planes
from ffd.selection import top_k, top_p_threshold
from tests.method_harness import append, filled, make_case, new_layer, prefill
from tests.tiny import random_prompt, tiny_model
from tests.toy_method import Strided

CONF = Path(__file__).parent.parent / "conf" / "method"


def exact_scores(case, row: int, head: int, q: torch.Tensor, length: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
    group = q.shape[1] // case.keys.shape[1]
    return case.keys[row, head // group, :length] @ q[row, head] * case.scale


@pytest.mark.parametrize("name", method_names())
def test_the_yaml_lists_every_knob_with_its_default(name: str) -> None:
    found = method_class(name)
    listed = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert listed == {"name": name} | {f.name: f.default for f in fields(found)}


@pytest.mark.parametrize("name", method_names())
def test_every_method_has_a_card(name: str) -> None:
    path = CONF.parent.parent / "docs" / "methods" / f"{name}.md"
    card = path.read_text() if path.exists() else ""
    missing = [f"`{f.name}`" for f in fields(method_class(name)) if f"`{f.name}`" not in card]
    assert card, f"write docs/methods/{name}.md"
    assert not missing, f"docs/methods/{name}.md does not name {', '.join(missing)}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:Stride", "cannot import no_such_module"),
        ("tests.toy_method:Nothing", "tests.toy_method has no subclass of ffd.methods.Method named Nothing"),
    ],
)
def test_a_method_that_lives_nowhere_is_one_line(name: str, said: str) -> None:
    """It was a traceback of Hydra's."""
    with pytest.raises(KnobError, match=said):
        method_class(name)


@pytest.mark.parametrize(
    ("name", "knob", "value"),
    [
        ("quest", "page_size", 24),
        ("quest", "token_budget", 8),
        ("quest", "last_page", "first"),
        ("quest", "skip_layers", -1),
        ("twilight", "p", 0.0),
        ("twilight", "p", 1.5),
        ("twilight", "base", "h2o"),
        ("twilight", "search_start", "zero"),
        ("kivi", "bits", 3),
        ("kivi", "residual_length", 100),
        ("topk", "token_budget", 0),
        ("topk", "keep_fraction", 0.0),
        ("topp", "p", 2.0),
        ("topdelta", "delta", -1.0),
        ("topdelta", "granularity", "word"),
        ("topdelta", "unit_size", 32),
        ("sink_threshold", "delta", math.nan),
        ("sink_threshold", "select_per", "layer"),
        ("streaming", "window", 0),
        ("streaming", "n_sink", -4),
    ],
)
def test_a_bad_knob_is_named_with_what_is_accepted(name: str, knob: str, value: object) -> None:
    with pytest.raises(KnobError, match=rf"{knob}={value}: expected "):
        create(name, {knob: value})


def test_topk_keeps_the_budget_and_breaks_ties_by_position() -> None:
    scores = torch.tensor([[[1.0, 3.0, 2.0, 3.0, -math.inf, 2.0]]])
    assert top_k(scores, torch.tensor([3])).tolist() == [[[False, True, True, True, False, False]]]
    assert top_k(scores, torch.tensor([9])).sum() == 5  # what is no candidate is never kept


@pytest.mark.parametrize(("granularity", "unit"), [("token", 1), ("page", 16), ("sub_block", 32)])
@pytest.mark.parametrize("select_per", ["head", "group"])
def test_topk_by_brute_force(granularity: str, unit: int, select_per: str) -> None:
    case = make_case()
    knobs = {"token_budget": 64, "granularity": granularity, "select_per": select_per}
    layer, q = filled(create("topk", knobs), case, [150])
    selection = layer.select(q, case.scale)
    best = torch.stack(
        [torch.stack([part.max() for part in exact_scores(case, 0, h, q, 150).split(unit)]) for h in range(4)]
    )
    if select_per == "group":
        best = best.unflatten(0, (2, 2)).amax(dim=1).repeat_interleave(2, dim=0)
    for head in range(4):
        chosen = set(best[head].topk(64 // unit).indices.tolist())
        expected = [token // unit in chosen for token in range(150)]
        assert selection.selected[0, head].tolist() == expected
    assert torch.equal(selection.selected, selection.attended)


def test_topk_keeps_a_fraction_of_each_row() -> None:
    case = make_case(batch=2)
    layer, q = filled(create("topk", {"keep_fraction": 0.25}), case, [150, 101])
    assert layer.select(q, case.scale).selected.sum(dim=-1).tolist() == [[38] * 4, [26] * 4]


@pytest.mark.parametrize(("granularity", "unit"), [("token", 1), ("page", 16)])
def test_topp_is_the_smallest_set_with_the_mass(granularity: str, unit: int) -> None:
    case = make_case()
    layer, q = filled(create("topp", {"p": 0.7, "granularity": granularity}), case, [150])
    selected = layer.select(q, case.scale).selected
    for head in range(4):
        probability = torch.softmax(exact_scores(case, 0, head, q, 150).double(), dim=-1)
        mass = torch.stack([part.sum() for part in probability.split(unit)])
        kept = selected[0, head, ::unit]
        assert mass[kept].sum() >= 0.7 > mass[kept].sum() - mass[kept].min()
        assert mass[kept].min() >= mass[~kept].max()


def test_topp_of_one_keeps_what_rounding_would_lose() -> None:
    scores = torch.tensor([[[0.0, -60.0, -200.0]]])
    assert top_p_threshold(scores, 1.0).item() == -math.inf


def test_topdelta_and_sink_threshold_differ_by_the_reference_score() -> None:
    case = make_case()
    for name, anchor in (("topdelta", torch.max), ("sink_threshold", lambda s: s[0])):
        layer, q = filled(create(name, {"delta": 1.25}), case, [150])
        selected = layer.select(q, case.scale).selected
        for head in range(4):
            scores = exact_scores(case, 0, head, q, 150)
            assert torch.equal(selected[0, head], scores >= anchor(scores) - 1.25)


def test_rules_with_a_margin_tell_what_they_measure_it_from() -> None:
    case = make_case()
    for name, anchor in (("topdelta", torch.max), ("sink_threshold", lambda s: s[0])):
        layer, q = filled(create(name, {"delta": 1.25, "granularity": "page"}), case, [150])
        selection = layer.select(q, case.scale)
        assert float(selection.margin) == 1.25  # type: ignore[arg-type]
        expected = torch.stack([anchor(exact_scores(case, 0, head, q, 150)) for head in range(4)])
        torch.testing.assert_close(selection.pseudo_max, expected[None])
    layer, q = filled(create("topk"), case, [150])
    assert layer.select(q, case.scale).pseudo_max is None


def test_kivi_restores_incrementally_what_its_codes_say() -> None:
    case = make_case(batch=2, d=64)
    layer = new_layer(create("kivi", {"residual_length": 32}), case)
    prefill(layer, case, [40, 95])
    for _ in range(40):
        append(layer, case)
        for kept, restored in ((layer.stored_keys, layer.restored_keys), (layer.stored_values, layer.restored_values)):  # type: ignore[attr-defined]
            for row, length in enumerate(layer.lengths.tolist()):
                assert torch.equal(kept(length)[row], restored(length)[row])


def test_a_group_attends_to_the_union_of_its_heads_sets() -> None:
    case = make_case()
    layer, q = filled(create("topdelta", {"delta": 1.0, "select_per": "group"}), case, [150])
    selection = layer.select(q, case.scale)
    union = selection.selected.unflatten(1, (2, 2)).any(dim=2)
    assert torch.equal(selection.attended, union.repeat_interleave(2, dim=1))
    assert not torch.equal(selection.selected, selection.attended)


def test_force_local_adds_the_current_unit_alone() -> None:
    case = make_case()
    plain, forced = (
        filled(create("sink_threshold", {"delta": 0.0, "granularity": "page", "force_local": f}), case, [150])
        for f in (False, True)
    )
    before, after = (layer.select(q, case.scale).selected for layer, q in (plain, forced))
    assert torch.equal(after[..., :144], before[..., :144])
    assert after[..., 144:].all()
    assert not before[..., 144:].all()


def quest_pages(case, q: torch.Tensor, head: int, length: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Upper bounds by the definition: per page and channel, the larger of the two products."""
    pages = case.keys[0, head // 2, :length].split(16)
    return torch.stack([torch.maximum(q[0, head] * p.amax(0), q[0, head] * p.amin(0)).sum() for p in pages])


@pytest.mark.parametrize("length", [144, 145, 150])
@pytest.mark.parametrize("last_page", ["kernel", "eval"])
def test_quest_by_brute_force(last_page: str, length: int) -> None:
    case = make_case()
    layer, q = filled(create("quest", {"token_budget": 64, "last_page": last_page}), case, [length])
    selection = layer.select(q, case.scale)
    for head in range(4):
        bounds = quest_pages(case, q, head, length)
        if last_page == "kernel":
            chosen = {*bounds[:-1].topk(3).indices.tolist(), len(bounds) - 1}
        else:
            chosen = set(bounds.topk(4).indices.tolist())
        assert selection.selected[0, head].tolist() == [token // 16 in chosen for token in range(length)]
    assert torch.equal(selection.estimate.isnan()[0, 0], torch.arange(length) >= selection.scanned)
    assert selection.scanned.item() == (144 - 16 * (length == 144) if last_page == "kernel" else length)


def test_quest_bounds_bound_and_survive_appends() -> None:
    case = make_case()
    layer = new_layer(create("quest", {"token_budget": 32}), case)
    prefill(layer, case, [30])
    for _ in range(40):
        q = append(layer, case)
    bounds = layer.bounds.scores(q, case.scale, 5)  # type: ignore[attr-defined]
    scores = layer.select(q, case.scale).scores
    best = torch.nn.functional.pad(scores, (0, 10), value=-math.inf).unflatten(-1, (5, 16)).amax(-1)
    assert (bounds >= best - 1e-5).all()


def test_quest_reads_no_bounds_where_every_page_fits() -> None:
    case = make_case()
    layer, q = filled(create("quest", {"token_budget": 160}), case, [150])
    selection = layer.select(q, case.scale)
    assert selection.scanned.item() == 0
    assert selection.selected.all()


def test_quest_eval_variant_keeps_three_pages_at_least() -> None:
    assert create("quest", {"token_budget": 16, "last_page": "eval"}).budget == 3  # type: ignore[attr-defined]
    assert create("quest", {"token_budget": 16}).budget == 1  # type: ignore[attr-defined]


def rounded(x: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """Nearest of 2**bits levels between the extremes, minimum and step in fp16 as the official codes store them."""
    low = x.amin(dim, keepdim=True).half().float()
    step = ((x.amax(dim, keepdim=True) - low) / (2**bits - 1)).half().float()
    return torch.round((x - low) / step).clamp(0, 2**bits - 1) * step + low


@pytest.mark.parametrize("search_start", ["max", "first_token"])
def test_twilight_prunes_the_estimates_of_all_tokens(search_start: str) -> None:
    case = make_case(seed=3)
    knobs = {"base": "all", "p": 0.6, "search_start": search_start}
    layer, q = filled(create("twilight", knobs), case, [150])
    selection = layer.select(q, case.scale)
    for head in range(4):
        estimate = rounded(case.keys[0, head // 2, :150], -1, 4) @ q[0, head] * case.scale
        torch.testing.assert_close(selection.estimate[0, head], estimate, atol=1e-4, rtol=1e-4)
        weight = torch.softmax(selection.estimate[0, head].double(), dim=-1)
        kept = selection.selected[0, head]
        assert weight[kept].sum() >= 0.6
        if search_start == "max" or weight[0] >= weight[kept].min():
            assert weight[kept].min() >= weight[~kept].max()
        if search_start == "max":
            assert weight[kept].sum() - weight[kept].min() < 0.6
        else:
            assert kept[0]  # the threshold never exceeds token 0's weight


def test_twilight_estimates_the_base_selection_alone() -> None:
    case = make_case()
    layer, q = filled(create("twilight", {"token_budget": 64, "p": 1.0}), case, [150])
    quest, _ = filled(create("quest", {"token_budget": 64, "last_page": "eval"}), case, [150])
    selection, base = layer.select(q, case.scale), quest.select(q, case.scale)
    assert torch.equal(selection.selected, base.selected)
    assert torch.equal(~selection.estimate.isnan(), base.selected)
    assert torch.equal(selection.estimated, base.union(2).sum(dim=-1))


@pytest.mark.parametrize("bits", [2, 4])
def test_minmax_codes_lie_within_half_a_step(bits: int) -> None:
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)) * 3
    quantized = quantize_minmax(x, bits, dim=-1)
    error = (dequantize_minmax(quantized.codes, quantized.minimum, quantized.step) - x).abs()
    assert (error <= quantized.step.float() * 0.5 + 4e-3).all()
    for word in (torch.uint8, torch.int16):
        packed = pack_planes(quantized.codes, bits, word)
        assert packed.shape[-1] * packed.itemsize == 64 * bits // 8
        assert torch.equal(unpack_planes(packed, bits), quantized.codes)
    constant = quantize_minmax(torch.full((1, 8), 2.5), bits, dim=-1)
    assert dequantize_minmax(constant.codes, constant.minimum, constant.step).unique().tolist() == [2.5]


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("length", [20, 33, 64, 65, 66, 97, 98, 150])
def test_kivi_quantises_what_the_residuals_no_longer_hold(bits: int, length: int) -> None:
    """Residual 32: between steps 0..31 keys and 32 values are exact; the step itself sees its token on top."""
    case = make_case(d=64)
    layer, _ = filled(create("kivi", {"bits": bits, "residual_length": 32}), case, [length])
    exact_keys, exact_values = (length - 1) % 32 + 1, min(length, 33)
    keys, values = layer.stored_keys(length), layer.stored_values(length)  # type: ignore[attr-defined]
    split_keys, split_values = length - exact_keys, length - exact_values
    assert torch.equal(keys[:, :, split_keys:], case.keys[:, :, split_keys:length])
    assert torch.equal(values[:, :, split_values:], case.values[:, :, split_values:length])

    if split_keys:
        expected = rounded(case.keys[:, :, :split_keys].unflatten(2, (-1, 32)), 3, bits).flatten(2, 3)
        torch.testing.assert_close(keys[:, :, :split_keys], expected, atol=1e-5, rtol=1e-5)
    if split_values:
        expected = rounded(case.values[:, :, :split_values].unflatten(3, (-1, 32)), 4, bits).flatten(3, 4)
        torch.testing.assert_close(values[:, :, :split_values], expected, atol=1e-5, rtol=1e-5)


def test_kivi_counts_the_published_bytes_per_token() -> None:
    """d = 128, group 32: 48 + 48 bytes a token at 2 bits, 80 + 80 at 4 (methods: 5.3x and 3.2x under fp16)."""
    for bits, per_token in ((2, 48), (4, 80)):
        case = make_case(d=128)
        method = create("kivi", {"bits": bits, "residual_length": 32})
        layer, q = filled(method, case, [129], dtype=torch.float16)
        layer.decode(q, case.scale)
        moved = layer.bytes_read(layer.ledger.counts())
        assert moved["quantized_keys"].unique().tolist() == [128 * per_token]
        assert moved["quantized_values"].unique().tolist() == [96 * per_token]
        assert moved["residual_keys"].unique().tolist() == [256]
        assert moved["residual_values"].unique().tolist() == [33 * 256]


def test_streaming_reads_sinks_and_window() -> None:
    case = make_case()
    layer, q = filled(create("streaming", {"n_sink": 3, "window": 10}), case, [150])
    kept = layer.select(q, case.scale).selected[0, 0]
    assert kept.nonzero().flatten().tolist() == [0, 1, 2, *range(140, 150)]


TOY = "tests.toy_method:Strided"


def test_a_method_from_outside_the_package_runs_in_the_engine() -> None:
    model = tiny_model("llama")
    prompt = [random_prompt(60)]
    dense = Engine(model, create("dense"), capacity=96).generate(prompt, 16)
    assert Engine(model, create(TOY, {"stride": 1}), capacity=96).generate(prompt, 16).tokens == dense.tokens
    strided = Engine(model, create(TOY, {"stride": 2}), capacity=96).generate(prompt, 16)
    assert strided.ledger.complete
    assert strided.ledger.layers[0].union[0] == sum((61 + step + 1) // 2 for step in range(15))
    with pytest.raises(KnobError, match="pace=2: expected a knob of method strided"):
        create(TOY, {"pace": 2})


ODD = (True, None, 2.0, float("nan"), -1, 10**30, "x", [1], {"a": 1}, ())


@pytest.mark.parametrize("name", method_names())
def test_a_value_of_another_kind_is_one_line_that_names_its_knob(name):
    # True was taken for 1 and 128.0 for 128, under an identity of their own; lists were a TypeError that named every
    # knob but the wrong one; 10**30 tokens were an overflow in the middle of a run.
    own = create(name, {}).knobs()
    for knob, default in own.items():
        for value in ODD:
            accepted = {float: (int, float), type(None): object}.get(type(default), type(default))
            fits = isinstance(value, accepted) and isinstance(value, bool) == isinstance(default, bool)
            if value is None or fits:
                continue  # its own check has the word
            with pytest.raises(KnobError, match=rf"^{knob}=[^\n]*: expected [^\n]*$"):
                create(name, {knob: value})
        if isinstance(default, int) and not isinstance(default, bool):
            with pytest.raises(KnobError, match=rf"^{knob}="):
                create(name, {knob: 10**30})


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"stride": 2}, None),
        ({"stride": 0}, "^stride=0: expected an integer >= 1$"),  # the method's own words
        ({"stride": 2.0}, r"^stride=2.0: expected an integer below 2\*\*31$"),  # which its own check takes
        ({"stride": "far"}, r"^stride=far: expected an integer below 2\*\*31$"),  # which its own check cannot compare
    ],
)
def test_a_method_is_built_once_whichever_check_has_the_word(knobs: dict[str, object], message: str | None) -> None:
    built: list[object] = []

    @dataclass(frozen=True)
    class Checked(Strided):
        def __post_init__(self) -> None:
            built.append(self.stride)
            require(self.stride >= 1, "stride", self.stride, "an integer >= 1")

    if message is None:
        assert Checked.from_knobs(knobs).knobs() == knobs
    else:
        with pytest.raises(KnobError, match=message):
            Checked.from_knobs(knobs)
    assert built == [knobs["stride"]]  # it was built twice


def test_a_type_error_that_no_annotation_explains_is_not_swallowed() -> None:
    @dataclass(frozen=True)
    class Faulty(Strided):
        def __post_init__(self) -> None:
            raise TypeError("a fault of the method's own")

    with pytest.raises(TypeError, match="a fault of the method's own"):
        Faulty.from_knobs({"stride": 2})
