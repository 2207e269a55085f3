"""Fused paths of all methods under the interpreter, generated from the registry; and their selection kernels."""

from __future__ import annotations

import math

import pytest
import torch

from ffd.kernels import digit_search, thresholds
from ffd.kernels.scores import score_rows
from ffd.kernels.thresholds import bisect_top_p, radix_top_k
from ffd.methods import LayerGeometry, create, method_names
from ffd.selection import top_k, top_p_threshold
from ffd.thumbnails import Thumbnails
from tests.method_checks import check_appends, check_executors, check_ledger
from tests.method_harness import CAPACITY, make_case, method_of

NAMES = method_names()
BLOCKS = {"delta": 0.8, "token_budget": 32, "p": 0.7, "block_size": 64, "sub_block": 16, "n_sink": 4, "n_local": 20}
COMPONENTS = [
    (2, "topk", "fused"),
    (2, "topp", "decoupled"),
    (4, "topdelta", "fused"),
    (4, "topk", "decoupled"),
    (8, "topp", "fused"),
    (8, "topdelta", "decoupled"),
    (16, "topk", "fused"),
    (16, "topdelta", "fused"),
]
VARIANTS = [
    ("quest", {"token_budget": 64, "last_page": "eval", "skip_layers": 0}),
    ("quest", {"token_budget": 16, "select_per": "group", "skip_layers": 0}),
    ("quest", {"token_budget": 64, "page_size": 32, "select_per": "group", "last_page": "eval"}),
    ("twilight", {"base": "all", "p": 0.7, "search_start": "first_token"}),
    ("twilight", {"token_budget": 64, "p": 1.0, "select_per": "group"}),
    ("kivi", {"bits": 4, "group_size": 16, "residual_length": 16}),
    ("kivi", {"residual_length": 128}),
    ("topk", {"token_budget": 40, "select_per": "group"}),
    ("topk", {"keep_fraction": 0.3, "granularity": "page", "force_local": True}),
    ("topk", {"token_budget": 64, "granularity": "sub_block", "select_per": "group"}),
    ("topp", {"p": 0.8, "granularity": "page"}),
    ("topp", {"p": 0.6, "select_per": "group", "force_local": True}),
    ("topdelta", {"delta": 0.5, "granularity": "block", "unit_size": 64}),
    ("topdelta", {"delta": 2.0, "select_per": "group"}),
    ("sink_threshold", {"delta": 0.0, "granularity": "page", "select_per": "group"}),
    *(("component", {**BLOCKS, "bits": bits, "select": select, "path": path}) for bits, select, path in COMPONENTS),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("group", "d"), [(1, 128), (3, 80), (7, 64)])
def test_the_executors_agree(name: str, group: int, d: int) -> None:
    check_executors(method_of(name), make_case(batch=3, group=group, d=d, seed=group), 1e-4)


@pytest.mark.parametrize(("name", "knobs"), VARIANTS)
def test_the_executors_agree_on_every_switch(name: str, knobs: dict[str, object]) -> None:
    check_executors(create(name, knobs), make_case(batch=3, d=64, seed=11), 1e-4)


def test_a_method_from_outside_the_package_is_fused_by_its_mask() -> None:
    check_executors(create("tests.toy_method:Strided", {"stride": 3}), make_case(batch=3, group=3), 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_executors_agree_where_everything_is_kept(name: str) -> None:
    check_executors(method_of(name, "keep_all_knobs"), make_case(batch=3, seed=2), 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_executors_agree_after_appends_across_boundaries(name: str) -> None:
    check_appends(method_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_fused_ledger_equals_a_recount_of_the_reference_selection(name: str) -> None:
    check_ledger(method_of(name), "fused")


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_block_is_quantised_on_the_device_as_in_torch(bits: int) -> None:
    case = make_case(batch=2, d=80)
    case.keys[:, 0, :, 3] = 0.0
    keys = case.keys.half().contiguous()
    geometry = LayerGeometry(2, 4, 2, 80, CAPACITY, torch.float16, torch.device("cpu"))
    fused, plain = (Thumbnails(geometry, bits, 64) for _ in range(2))
    for lengths in ([65, 128], [66, 129], [1, 0]):  # row 0 opens its second block, then row 1 its third
        for executor, thumbnails in (("fused", fused), ("reference", plain)):
            thumbnails.append(keys, torch.tensor(lengths, dtype=torch.int32), executor)
    assert torch.equal(fused.codes, plain.codes)
    assert torch.equal(fused.half_step, plain.half_step)
    assert plain.half_step[1, 1, 1].all()
    assert not plain.half_step[0, :, 1].any()


@pytest.fixture(params=["one program a row", "many programs a row"])
def row_length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many programs a row":
        monkeypatch.setattr(thresholds, "_LONG", 0)
        monkeypatch.setattr(digit_search, "_CHUNK", 256)
        monkeypatch.setattr(digit_search, "_TILE", 128)


@pytest.mark.usefixtures("row_length")
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "negative", "huge"])
def test_radix_selection_equals_a_stable_sort(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(3, 2, 700, generator=generator)
    if kind == "ties":
        scores = (scores * 2).round()
    elif kind == "zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    elif kind == "negative":
        scores = -scores.abs() - 5.0
    elif kind == "huge":
        scores = scores * 1e37
    count = torch.tensor([700, 511, 5], dtype=torch.int32)
    k = torch.tensor([77, 1, 9], dtype=torch.int32)
    threshold = radix_top_k(scores, count, k)
    index = torch.arange(700)
    assert threshold.tie_end is not None
    above, tied = scores > threshold.value[..., None], scores == threshold.value[..., None]
    kept = above | (tied & (index < threshold.tie_end[..., None])) | (threshold.value == -math.inf)[..., None]
    seen = index < count[:, None, None]
    expected = top_k(scores.masked_fill(~seen, -math.inf), k)
    assert torch.equal(kept & seen, expected)


@pytest.mark.usefixtures("row_length")
def test_radix_selection_of_nothing_keeps_nothing() -> None:
    threshold = radix_top_k(torch.zeros(1, 1, 300), torch.tensor([300], dtype=torch.int32), torch.zeros(1).int())
    assert threshold.value.item() == math.inf


@pytest.mark.usefixtures("row_length")
@pytest.mark.parametrize("p", [0.1, 0.85, 0.99])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_bisection_keeps_the_smallest_set(p: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(2, 3, 600, generator=generator) * spread
    scores[0, 0, 100:400] = -math.inf
    count = torch.tensor([600, 77], dtype=torch.int32)
    seen = torch.arange(600) < count[:, None, None]
    scores = scores.masked_fill(~seen, -math.inf)
    value = bisect_top_p(scores, count, scores.amax(-1, keepdim=True), p).value
    natural = scores * math.log(2)
    expected = natural >= top_p_threshold(natural, p)[..., None]
    assert torch.equal((scores >= value[..., None]) & seen, expected & seen & (scores > -math.inf))


def test_pages_beyond_the_count_are_neither_read_nor_written() -> None:
    case = make_case(batch=1, d=32)
    keys = case.keys.contiguous()
    keys[:, :, 100:] = torch.nan
    q = case.queries[0].contiguous()
    scores = score_rows(q, keys, torch.tensor([100], dtype=torch.int32), case.scale, store_tokens=True)
    expected = (q.unflatten(1, (2, 2)) @ keys[:, :, :100].transpose(-1, -2)).flatten(1, 2) * case.scale
    torch.testing.assert_close(scores.tokens[..., :100] * math.log(2), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.maxima.amax(-1) * math.log(2), expected.amax(-1), rtol=1e-4, atol=1e-5)
