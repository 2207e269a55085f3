"""How long a run will take, from the model's size, the prompts and two quick measurements of the machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from experiments.prepare import Prepared

_PREFILL_EFFICIENCY = {"cpu": 0.8, "cuda": 0.5}  # of the matrix rate measured on one large product
_DECODE_EFFICIENCY = 0.5  # of the copy bandwidth
_LAYER_SECONDS = {"cpu": 2e-3, "cuda": 6e-6}  # of a layer's decode step beside its weights; on a CPU mostly Python's


@dataclass(frozen=True)
class Estimate:
    """Expected cost of the samples that are still to run."""

    samples: int
    prompt_tokens: int
    new_tokens: int
    """If every answer takes all that its sample allows; most stop earlier."""
    prefill_seconds: float
    decode_seconds: float
    """Of ``new_tokens``."""

    def line(self) -> str:
        """One line for the terminal."""
        at_most = duration(self.prefill_seconds + self.decode_seconds)
        return (
            f"{self.samples} samples to run, {self.prompt_tokens} prompt tokens, at most {self.new_tokens} new tokens: "
            f"about {duration(self.prefill_seconds)} of prefill, about {at_most} in all if no answer stops early"
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
    lengths = [prepared.prompt_tokens(sample) for sample in pending]
    new_tokens = sum(sample.max_new_tokens for sample in pending)
    operations = sum(2 * parameters * tokens + attention * tokens * tokens for tokens in lengths)
    step = parameters * width / (bandwidth * _DECODE_EFFICIENCY) + text.num_hidden_layers * _LAYER_SECONDS[device]
    return Estimate(
        samples=len(pending),
        prompt_tokens=sum(lengths),
        new_tokens=new_tokens,
        prefill_seconds=operations / (flops * _PREFILL_EFFICIENCY[device]),
        decode_seconds=new_tokens * step,
    )


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
    """Matrix rate in FLOP/s, copy bandwidth in bytes/s, and bytes per weight on a device."""
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
    copy = torch.empty_like(big)  # written once before it counts: on a CPU its pages come with the first write
    bandwidth = 2 * big.numel() / best(lambda: copy.copy_(big))
    return flops, bandwidth, dtype.itemsize


def _synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
