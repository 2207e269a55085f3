"""How long a run will take, from the model's size, the prompts and two quick measurements of the machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from experiments.prepare import Prepared

_PREFILL_EFFICIENCY = 0.5  # of the matrix rate measured on one large product
_DECODE_EFFICIENCY = 0.5  # of the copy bandwidth, host overhead of small steps included
_STEP_OVERHEAD = {"cpu": 5e-3, "cuda": 2e-4}  # seconds a decode step costs beside moving the weights
_NEW_TOKENS_SHARE = 0.7  # of the limit; answers end early


@dataclass(frozen=True)
class Estimate:
    """Expected cost of the samples that are still to run."""

    samples: int
    prompt_tokens: int
    new_tokens: int
    seconds: float

    def line(self) -> str:
        """One line for the terminal."""
        return (
            f"{self.samples} samples to run, {self.prompt_tokens} prompt tokens, up to {self.new_tokens} new tokens: "
            f"about {duration(self.seconds)}"
        )


def estimate(prepared: Prepared, pending: list[Any]) -> Estimate:
    """Estimate a run before its weights are loaded.

    Parameters
    ----------
    prepared
        The run.
    pending
        Samples that are still to run.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    parameters = count_parameters(prepared.model.config)
    flops, bandwidth, width = _machine(device)
    text = prepared.model.config.get_text_config(decoder=True)
    attention = 2 * text.num_hidden_layers * text.hidden_size  # FLOPs per token pair, causal half taken
    prompt = new = 0
    seconds = 0.0
    for sample in pending:
        tokens, limit = prepared.prompt_tokens(sample), sample.max_new_tokens
        prompt, new = prompt + tokens, new + limit
        seconds += (2 * parameters * tokens + attention * tokens * tokens) / (flops * _PREFILL_EFFICIENCY)
        step = parameters * width / (bandwidth * _DECODE_EFFICIENCY) + _STEP_OVERHEAD[device]
        seconds += limit * _NEW_TOKENS_SHARE * step
    return Estimate(len(pending), prompt, new, seconds)


def count_parameters(config: Any) -> int:
    """Parameters of a model, counted on the meta device: no weight is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


def duration(seconds: float) -> str:
    """Seconds as a person would say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _machine(device: str) -> tuple[float, float, int]:
    """Matrix rate in FLOP/s, read bandwidth in bytes/s, and bytes per weight on a device."""
    import torch

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    n = 4096 if device == "cuda" else 768
    a = torch.randn(n, n, dtype=dtype, device=device)
    big = torch.empty(2**27 if device == "cuda" else 2**25, dtype=torch.uint8, device=device)

    def best(action: Any) -> float:
        times = []
        for _ in range(4):
            _synchronize(device)
            start = time.perf_counter()
            action()
            _synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    flops = 2 * n**3 / best(lambda: a @ a)
    bandwidth = 2 * big.numel() / best(big.clone)
    return flops, bandwidth, dtype.itemsize


def _synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
