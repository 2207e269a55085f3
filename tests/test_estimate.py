"""The time a run is said to take before it begins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from experiments import estimate
from tests.tiny import tiny_model


@pytest.fixture
def machine(monkeypatch):
    """A machine of 1 GFLOP/s and 1 GB/s, without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(estimate, "_machine", lambda device: (1e9, 1e9, 4))


def prepared(model):
    return SimpleNamespace(model=SimpleNamespace(config=model.config), prompt_tokens=lambda sample: sample.tokens)


def test_prefill_and_decoding_are_told_apart_and_the_whole_is_called_a_bound(machine):
    # The line once said "about" of 0.7 times all new tokens, whatever the answers did.
    model = tiny_model("llama")
    pending = [SimpleNamespace(tokens=tokens, max_new_tokens=50) for tokens in (1000, 2000)]
    found = estimate.estimate(prepared(model), pending)
    assert (found.samples, found.prompt_tokens, found.new_tokens) == (2, 3000, 100)
    parameters = sum(p.numel() for p in model.parameters())
    products = 2 * parameters * 3000 + 2 * 2 * 64 * (1000**2 + 2000**2)  # two layers, hidden size 64
    assert found.prefill_seconds == pytest.approx(products / (1e9 * 0.8))
    assert found.decode_seconds == pytest.approx(100 * (4 * parameters / 0.5e9 + 2 * 2e-3))
    whole = estimate.duration(found.prefill_seconds + found.decode_seconds)
    assert found.line().endswith(f"of prefill, about {whole} in all if no answer stops early")
