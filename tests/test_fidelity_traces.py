"""Traces: recorded steps replayed offline give what the probe saw in the model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eval.fidelity import FidelityProbe, FidelityState, summary
from eval.fidelity.replay import replay
from eval.fidelity.traces import FORMAT, Trace, TraceRecorder
from ffd import FFD, Dense, Engine, Method
from tests.tiny import random_prompt, tiny_model

PROMPTS = [random_prompt(150, 1), random_prompt(122, 2)]
METHOD = FFD(delta=1.0, block_size=64, sub_block=16, centre=True)


def engine(method: Method, probe: FidelityProbe | TraceRecorder) -> Engine:
    made = Engine(
        tiny_model("llama", heads=6, kv_heads=2),
        method,
        capacity=200,
        batch_size=2,
        executor="reference",
        probe=probe,
        probe_every=3,
    )
    made.cache.follow_dense = True
    return made


def recorded(*, values: bool = True) -> tuple[Trace, list[list[int]]]:
    recorder = TraceRecorder([1, 0], values=values)
    tokens = engine(Dense(), recorder).generate(PROMPTS, 12).tokens
    return recorder.take("tiny", 11), tokens


def test_all_layers_are_recorded_where_none_is_named() -> None:
    recorder = TraceRecorder()
    engine(Dense(), recorder).generate(PROMPTS, 12)
    trace, (named, _) = recorder.take(), recorded()
    assert trace.layers == named.layers == (0, 1)
    assert all(torch.equal(trace.keys[layer], named.keys[layer]) for layer in trace.layers)
    with pytest.raises(ValueError, match="nothing was recorded for any layer"):
        TraceRecorder().take()


def assert_same(a: FidelityState, b: FidelityState) -> None:
    assert a.layers == b.layers
    assert a.count.equal(b.count)
    torch.testing.assert_close(a.value_sum, b.value_sum, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [METHOD, replace(METHOD, residual="none", centre=False)])
def test_replay_equals_the_probe_on_the_dense_trajectory(method: FFD) -> None:
    """A block is completed during the recorded steps, so appending is replayed too."""
    trace, tokens = recorded()
    probe = FidelityProbe()
    generation = engine(method, probe).generate(PROMPTS, 12)
    assert generation.tokens == tokens
    live = probe.take()
    assert summary(live)["mass_recall"] < 1
    assert_same(replay(trace, method), live)


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace, _ = recorded()
    path = tmp_path / "a" / "trace.safetensors"
    trace.save(path)
    loaded = Trace.load(path)
    assert (loaded.layers, loaded.scale, loaded.note, loaded.decode_steps) == ((0, 1), trace.scale, "tiny", 11)
    assert loaded.queries[1].shape == (4, 2, 6, 16)  # steps 0, 3, 6, 9 of eleven
    assert loaded.lengths.tolist() == [[150 + s, 122 + s] for s in (1, 4, 7, 10)]
    assert_same(replay(loaded.to("cpu"), METHOD), replay(trace, METHOD))
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"trace\.safetensors: damaged"):
        Trace.load(path)


def test_without_values_there_are_scores_but_no_outputs() -> None:
    full, bare = (summary(replay(recorded(values=values)[0], METHOD)) for values in (True, False))
    assert bare["output_rel_error"] is None
    assert bare["mass_recall"] == full["mass_recall"]
    assert bare["lse_error_max"] == full["lse_error_max"]


def test_recall_is_monotone_over_a_replayed_sweep() -> None:
    trace, _ = recorded(values=False)
    recalls = [summary(replay(trace, replace(METHOD, delta=delta)))["mass_recall"] for delta in (0.0, 1.0, 4.0, 1e9)]
    assert recalls == sorted(recalls)
    assert recalls[-1] == pytest.approx(1.0)


def test_taking_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"layers=\[7\]: nothing was recorded for \[7\]"):
        TraceRecorder([7]).take()


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ("[1, 2]", "not a trace"),
        ("{broken", "not a trace"),
        ('{"format": "ffd-trace-1", "layers": [], "note": "x", "scale": 1.0}', "damaged trace (no lengths)"),
        ('{"format": "ffd-trace-1", "layers": []}', "damaged trace (no scale)"),
    ],
)
def test_a_file_that_is_no_trace_is_said_so(tmp_path: Path, described: str, said: str) -> None:
    # Valid metadata of another form, or a missing tensor, were an AttributeError and a KeyError.
    described = described.replace("ffd-trace-1", FORMAT)
    save_file({"x": torch.zeros(1)}, tmp_path / "t.safetensors", metadata={"trace": described})
    with pytest.raises(ValueError, match=re.escape(said)):
        Trace.load(tmp_path / "t.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: {"queries": {1: t.queries[1]}},
            "expected keys, queries and values or none for each of layers [0, 1]",
        ),
        (lambda t: {"values": {0: t.values[0]}}, "expected keys, queries and values or none for each of layers [0, 1]"),
        (lambda t: {"lengths": t.lengths[:0], "active": t.active[:0]}, "lengths of shape [0, 2]"),
        (lambda t: {"lengths": t.lengths[1:], "active": t.active[1:]}, "queries of other steps or rows"),
        (lambda t: {"lengths": t.lengths + 50}, "keys"),
        (lambda t: {"lengths": t.lengths * 0 + 1}, "lengths to 1 beside prompts"),
        (lambda t: {"scale": "x"}, "scale x"),
    ],
)
def test_a_trace_whose_parts_do_not_fit_is_said_so(tmp_path: Path, change: Any, said: str) -> None:
    """Once these were errors of torch in the middle of a replay, and two of them figures.

    Values of one layer alone had the other's keys serve as its values; lengths below the prompt's gave no step at all.
    """
    trace = recorded()[0]
    path = tmp_path / "t.safetensors"
    replace(trace, **change(trace)).save(path)
    with pytest.raises(ValueError, match=re.escape("damaged trace (")) as refused:
        Trace.load(path)
    assert said in str(refused.value)
