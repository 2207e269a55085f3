"""The law of equal budgets on the embedded model: an oracle loses no more than what it bounds, dense loses nothing.

Teacher-forced: every method sees the keys, values and queries of the same dense run, and its attention output is
compared with dense's, per layer, head and step. The law holds in the mean, not for every single row: an oracle ranks
by score, and the output depends on the values too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eval.data import sources, store
from eval.fidelity.replay import replay_steps
from eval.fidelity.traces import Trace, TraceRecorder
from eval.models import ModelSpec, load_model
from ffd import Engine, reference
from ffd.continuation import GivenTokens
from ffd.methods import create
from ffd.selection import unit_logsumexp
from ffd.teacher import forced_logits

pytestmark = pytest.mark.slow

PROMPT_TOKENS, STEPS, LAYERS = 700, 6, (2, 9, 16, 23)
LICENCE = Path(__file__).resolve().parent.parent / "LICENSE"
FFD = {"block_size": 64, "sub_block": 16, "n_sink": 16, "n_local": 64}
APPROXIMATIONS = [
    ("streaming", {"n_sink": 4, "window": 124}, 1, False),
    ("quest", {"token_budget": 64, "last_page": "eval", "skip_layers": 0}, 16, False),
    ("quest", {"token_budget": 256, "select_per": "group", "skip_layers": 0}, 16, True),
    ("twilight", {"p": 0.7, "base": "all", "skip_layers": 0}, 1, False),
    ("ffd", {"delta": 2.0, **FFD}, 16, True),
    ("component", {"bits": 2, "select": "topk", "token_budget": 128, "path": "fused", **FFD}, 16, True),
]
"""Method, knobs, tokens per unit, and whether a group shares one list."""


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A few decode steps after a page of prose."""
    if not store.is_cached(sources.SOURCES["model/smollm2_135m"]):
        pytest.skip("model/smollm2_135m is not cached; run `python -m eval.data fetch --for tests`")
    loaded = load_model(ModelSpec(device="cpu"))
    tokens = loaded.tokenizer(LICENCE.read_text())["input_ids"][: PROMPT_TOKENS + STEPS + 1]
    recorder = TraceRecorder(LAYERS)
    engine = Engine(loaded.model, create("dense"), capacity=PROMPT_TOKENS + STEPS + 2, probe=recorder)
    for _ in forced_logits(engine, [tokens[:PROMPT_TOKENS]], GivenTokens([tokens[PROMPT_TOKENS:]])):
        pass
    return recorder.take()


@torch.inference_mode()
def errors(trace: Trace, name: str, knobs: dict[str, object], unit: int, pool: bool) -> tuple[float, float, float]:
    """Share attended, mean relative error of the output, and that of the units with most mass, as many in each row.

    ``pool`` ranks units by their mass for all heads of the group, where a group shares its list.
    """
    kept, found, bounds = [], [], []
    for step in replay_steps(trace, create(name, knobs), "reference"):
        out, selection = step.storage.decode_reference(step.q, trace.scale)
        exact = step.dense.select(step.q, trace.scale)
        seen, n = exact.attended, exact.attended.shape[-1]
        count = reference.unit_max(selection.attended.float(), seen, unit).sum(dim=-1, keepdim=True)
        mass = torch.softmax(exact.scores.masked_fill(~seen, -torch.inf), dim=-1)
        ranked = unit_logsumexp(mass.log(), seen, unit).exp()
        if pool:
            hkv = step.storage.geometry.num_kv_heads
            ranked = reference.share_with_group(reference.group_heads(ranked, hkv).sum(dim=2), ranked.shape[1])
        best = reference.expand_units(ranked.argsort(descending=True).argsort() < count, unit, n) & seen
        values = step.dense.stored_values(n)
        oracle, dense = (reference.masked_attention(exact.scores, mask, values)[0] for mask in (best, seen))
        kept.append(selection.attended.float().mean())
        found.append((out - dense).norm(dim=-1) / dense.norm(dim=-1))
        bounds.append((oracle - dense).norm(dim=-1) / dense.norm(dim=-1))
    return float(torch.stack(kept).mean()), float(torch.cat(found).mean()), float(torch.cat(bounds).mean())


@pytest.mark.parametrize(("name", "knobs", "unit", "pool"), APPROXIMATIONS)
def test_an_approximation_loses_more_than_the_best_units(
    trace: Trace, name: str, knobs: dict[str, object], unit: int, pool: bool
) -> None:
    share, error, best = errors(trace, name, knobs, unit, pool)
    assert 0.02 < share < 0.8
    assert 0.0 < best < error


@pytest.mark.parametrize(("name", "knobs"), [("topk", {"token_budget": 1 << 20}), ("topp", {"p": 1.0})])
def test_an_oracle_that_keeps_everything_is_dense(trace: Trace, name: str, knobs: dict[str, object]) -> None:
    share, error, _ = errors(trace, name, knobs, 1, False)
    assert share == 1.0
    assert error < 1e-5


def test_coarser_units_and_smaller_budgets_lose_more(trace: Trace) -> None:
    found = [
        errors(trace, "topk", {"token_budget": budget, "granularity": granularity}, 1, False)[1]
        for budget, granularity in ((256, "token"), (256, "page"), (128, "page"), (128, "sub_block"))
    ]
    assert 0.0 < found[0] < found[1] < found[2] < found[3]


def test_a_coarser_scan_loses_more(trace: Trace) -> None:
    knobs = {"select": "topk", "token_budget": 128, "block_size": 64, "sub_block": 16, "path": "decoupled"}
    found = {bits: errors(trace, "component", {**knobs, "bits": bits}, 16, True)[1] for bits in (16, 8, 4, 2)}
    assert found[8] == pytest.approx(found[16], rel=0.05)
    assert found[16] * 0.95 < found[4] < found[2]
