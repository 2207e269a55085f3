"""The probe on a real engine: tiny models, ragged batches, real storages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eval.fidelity import FidelityProbe, FidelityState, aggregate, summary, table
from eval.fidelity import probe as probe_module
from eval.fidelity.accumulate import NAMES
from ffd import FFD, Dense, Engine, Method
from ffd.methods import create
from tests.tiny import random_prompt, tiny_model

PROMPTS = [random_prompt(300, 1), random_prompt(211, 2), random_prompt(290, 3)]


def run(method: Method, *, prompts: list[list[int]] = PROMPTS, **extra: Any) -> FidelityState:
    probe = FidelityProbe(unit=64)
    engine = Engine(
        tiny_model("llama", heads=6, kv_heads=2),
        method,
        capacity=400,
        batch_size=len(prompts),
        executor="reference",
        probe=probe,
        probe_every=4,
    )
    probe.start()
    engine.generate(prompts, 10, **extra)
    return probe.take()


def test_keeping_everything_exactly_is_dense() -> None:
    numbers = summary(run(FFD(delta=float("inf"), residual="exact", block_size=64)))
    assert numbers["mass_recall"] == pytest.approx(1.0, abs=1e-12)
    assert numbers["salient_hit_rate"] == 1.0
    assert numbers["lse_error_max"] < 1e-5
    assert numbers["output_rel_error"] < 1e-5
    assert numbers["lse_omitted_max"] == 0.0
    assert numbers["probed_layers"] == 2
    assert numbers["probed_steps"] == 3 * len(PROMPTS)  # steps 0, 4 and 8 of nine


@pytest.mark.parametrize(
    "method", [FFD(delta=1.0, block_size=64, centre=True), create("quest", {"token_budget": 64, "skip_layers": 1})]
)
def test_layers_are_compared_alike_together_and_alone(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    together = run(method)
    monkeypatch.setattr(probe_module, "BYTES_AT_ONCE", 1)
    for name, value in run(method)._tensors().items():
        torch.testing.assert_close(value, together._tensors()[name], rtol=1e-12, atol=1e-12)
    assert aggregate(together)["mass_recall"]["macro"] < 1


def test_selection_and_quantisation_are_told_apart() -> None:
    exact = summary(run(FFD(delta=1.0, residual="exact", block_size=64, sub_block=16)))
    assert exact["lse_omitted_mean"] > 1e-3
    assert exact["lse_quantisation_max"] < 1e-5
    assert exact["lse_error_mean"] == pytest.approx(exact["lse_omitted_mean"], abs=1e-5)
    int8 = summary(run(FFD(delta=float("inf"), residual="int8", block_size=64)))
    assert int8["lse_omitted_max"] == 0.0
    assert int8["lse_error_max"] == int8["lse_quantisation_max"] > 1e-5
    coarse = summary(run(FFD(delta=float("inf"), residual="none", block_size=64)))
    assert coarse["lse_quantisation_mean"] > 10 * int8["lse_quantisation_mean"]
    assert coarse["output_rel_error"] > 0


def test_recall_grows_with_delta() -> None:
    recalls = [summary(run(FFD(delta=d, block_size=64, sub_block=16)))["mass_recall"] for d in (0.0, 2.0, 7.0)]
    assert recalls == sorted(recalls)
    assert recalls[0] < recalls[-1]


@pytest.mark.parametrize("residual", ["exact", "int8"])
def test_centring_does_not_show_in_the_logsumexp(residual: Any) -> None:
    """The scores of centred keys differ from the model's by nats; the error compares them shift-free."""
    plain, centred = (
        run(FFD(delta=float("inf"), residual=residual, block_size=64, centre=centre)) for centre in (False, True)
    )
    assert summary(centred)["lse_error_max"] < (1e-4 if residual == "exact" else 0.2)
    # Quantising differently changes the estimate, but the gap stays one between scores of the same scale.
    gaps = [aggregate(state)["pseudo_max_gap"]["macro"] for state in (plain, centred)]
    assert abs(gaps[0] - gaps[1]) < 1.0


def test_without_the_shift_centred_keys_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above: it must not pass because the constant happens to be small."""
    monkeypatch.setattr("eval.fidelity.metrics.natural", lambda scores, selection: scores)
    method = FFD(delta=float("inf"), residual="exact", block_size=64, centre=True)
    assert summary(run(method))["lse_error_max"] > 0.5


def test_a_batch_adds_up_to_its_rows_alone() -> None:
    method = FFD(delta=2.0, block_size=64, sub_block=32)
    together = run(method)
    alone = FidelityState(64)
    for prompt in PROMPTS:
        alone = alone.merge(run(method, prompts=[prompt]))
    assert together.steps.tolist() == alone.steps.tolist()
    assert together.count.equal(alone.count)
    torch.testing.assert_close(together.value_sum, alone.value_sum, rtol=1e-3, atol=1e-3)


def test_finished_rows_do_not_count() -> None:
    method = FFD(block_size=64)
    model_tokens = Engine(
        tiny_model("llama", heads=6, kv_heads=2), method, capacity=400, batch_size=3, executor="reference"
    ).generate(PROMPTS, 10)
    stop = model_tokens.tokens[0][2]
    ends = [row.index(stop) if stop in row else 9 for row in model_tokens.tokens]
    state = run(method, stop_tokens=[stop])
    # Decode step i produces token i + 1; a row is active in step i while its token i is no stop.
    expected = sum(1 for end in ends for step in (0, 4, 8) if step < end)
    assert state.steps.tolist() == [expected] * 2
    assert expected < 9


def test_layers_that_are_dense_are_not_probed() -> None:
    state = run(Dense())
    assert state.layers == ()
    assert summary(state)["null_reasons"]["mass_recall"] == "all layers are dense by configuration"
    assert table(state) == []


def test_keep_ratios_equal_the_ledger() -> None:
    """With every step probed, both count the same steps."""
    probe = FidelityProbe()
    engine = Engine(
        tiny_model("llama", heads=6, kv_heads=2),
        FFD(delta=1.0, block_size=64, sub_block=16),
        capacity=400,
        batch_size=3,
        executor="reference",
        probe=probe,
        probe_every=1,
    )
    report = engine.generate(PROMPTS, 6).ledger
    numbers = aggregate(probe.take())
    context = sum(layer.context for layer in report.layers)
    assert numbers["keep_io"]["micro"] == pytest.approx(sum(sum(x.union) / 2 for x in report.layers) / context)
    assert numbers["keep_head"]["micro"] == pytest.approx(sum(sum(x.selected) / 6 for x in report.layers) / context)
    assert numbers["keep_io"]["micro"] < 1


def test_states_of_samples_go_through_a_file(tmp_path: Path) -> None:
    state = run(FFD(block_size=64))
    path = tmp_path / "fidelity.safetensors"
    state.save(path)
    loaded = FidelityState.load(path)
    assert summary(loaded) == summary(state)
    assert loaded.histogram.equal(state.histogram)


def test_a_cache_without_exact_keys_is_refused() -> None:
    engine = Engine(tiny_model("llama"), FFD(block_size=64), capacity=100, executor="reference")
    engine.generate([random_prompt(20)], 2)
    with pytest.raises(ValueError, match="shadow=False"):
        FidelityProbe()(engine.cache.handles[0], torch.zeros(1, 4, 16), 1.0, torch.zeros(1, 4, 16))
    with pytest.raises(ValueError, match="unit=0"):
        FidelityProbe(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_observes_what_the_cpu_does() -> None:
    """Same stored keys and queries on both devices; the state must not depend on where it was summed."""
    from eval.fidelity.replay import replay
    from eval.fidelity.traces import TraceRecorder

    recorder = TraceRecorder([0, 1])
    model = tiny_model("llama", heads=6, kv_heads=2)
    Engine(model, Dense(), capacity=400, batch_size=3, executor="reference", probe=recorder, probe_every=4).generate(
        PROMPTS, 10
    )
    trace = recorder.take()
    method = FFD(delta=2.0, block_size=64, sub_block=16)
    host, device = (summary(replay(trace.to(where), method, executor="reference")) for where in ("cpu", "cuda"))
    assert host.pop("null_reasons") == device.pop("null_reasons")
    assert device == pytest.approx(host, rel=1e-3, abs=1e-3)


def test_the_documentation_defines_every_metric() -> None:
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in text] == []
