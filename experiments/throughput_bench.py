"""Time whole decode steps of a model on a GPU: dense and sparse under one engine, and dense as users run it.

Needs torch and transformers only. Three dense rows, because they answer different questions:
``paper-default`` is a bare forward loop over transformers' growing cache with SDPA as shipped,
``paper-flash`` the same with the flash backend forced, and ``fair`` is dense inside the CUDA-graph
engine that the sparse methods use. Only ``fair`` says what sparsity is worth.

Weights are random: a step's time does not depend on them. The cache is filled with random keys and
values; the kept fraction is an input, reached by moving the margin until the ledger measures it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ffd.engine import Engine, cache_keyword
from ffd.methods import Method
from ffd.methods.dense import Dense
from ffd.methods.ffd import FFD

SPARE_TOKENS = 192
"""Room in the cache for warm-up, calibration and timed steps."""
_TIMED_STEPS = 40
_EAGER_STEPS = 12


@dataclass(frozen=True)
class Row:
    """One measurement; the fields of the committed record."""

    protocol: str
    """fair (the engine), paper-default, paper-flash."""
    method: str
    B: int
    T: int
    kept_target: float
    kept: float
    """Measured by the ledger over the timed steps: union per kv head."""
    timing: str
    """graph or eager."""
    ms_per_step: float
    tokens_per_second: float
    bytes: float
    """Weights, and what the method's storage must read."""
    floor_ms: float
    """``bytes`` over the measured read bandwidth."""
    over_floor: float
    """``ms_per_step / floor_ms``."""


def random_model(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model of this configuration with random weights, made on the GPU."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def weight_bytes(model: Any) -> float:
    """Bytes of weights that a decode step reads: all but the input embedding's table, of which it reads a row."""
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return float(total if tied else total - embedding.numel() * embedding.element_size())


def cache_bytes(model: Any, method: Method, batch: int, tokens: int, kept: float) -> float:
    """Bytes of the cache that a step must read (16-bit scales and values, 8-bit residual at full width)."""
    text = model.config.get_text_config(decoder=True)
    d = text.head_dim
    per_token = 34 * d / 128 + kept * 3 * d if isinstance(method, FFD) else 4 * d
    return float(batch * tokens * text.num_key_value_heads * text.num_hidden_layers * per_token)


def time_engine(model: Any, method: Method, batch: int, tokens: int, kept: float, bandwidth: float) -> Row:
    """Time the engine's captured step on a cache of ``tokens`` tokens a row.

    Parameters
    ----------
    model
        On the GPU.
    method
        Dense or FFD.
    batch, tokens
        Rows, and tokens already in the cache.
    kept
        Target of the kept fraction; 1 for dense.
    bandwidth
        Measured read bandwidth in bytes a second.
    """
    engine = Engine(model, method, capacity=tokens + SPARE_TOKENS, batch_size=batch, graph=True)
    with torch.inference_mode():
        engine._prepare_capture()
        fill(engine, batch, tokens)
        if isinstance(method, FFD):
            reach(engine, kept)
        replay(engine, 3)
        clear(engine)
        times = []
        for _ in range(_TIMED_STEPS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay(engine, 1)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        measured = keep_io(engine)
    row = make_row("fair", method, batch, tokens, kept, measured, "graph", statistics.median(times), model, bandwidth)
    del engine
    release()
    return row


def fill(engine: Engine, batch: int, tokens: int) -> None:
    """Put random keys and values into every layer, as a prompt of ``tokens`` tokens would."""
    engine._begin([tokens] * batch, (), 0)
    generator = torch.Generator("cuda").manual_seed(1)
    for handle in engine.cache.handles:
        g = handle.storage.geometry
        shape = (g.batch_size, g.num_kv_heads, tokens, g.head_dim)
        keys, values = (torch.randn(shape, dtype=g.dtype, device=g.device, generator=generator) for _ in range(2))
        handle.storage.prefill(keys, values)
    engine.cache.seen_tokens = tokens
    engine._position.add_(1)


def reach(engine: Engine, kept: float) -> None:
    """Move the margin of all heads until a step keeps the target fraction; below zero where it must."""
    low, high = -8.0, 12.0
    for _ in range(12):
        middle = (low + high) / 2
        for handle in engine.cache.handles:
            handle.storage.delta_nats.fill_(middle)
        clear(engine)
        replay(engine, 1)
        low, high = (middle, high) if keep_io(engine) < kept else (low, middle)


def replay(engine: Engine, steps: int) -> None:
    """Run captured steps."""
    assert engine._captured is not None
    for _ in range(steps):
        engine._captured.replay()
        engine.cache.note_replayed_step()


def clear(engine: Engine) -> None:
    """Start the ledger anew."""
    for handle in engine.cache.handles:
        handle.storage.ledger.reset()


def keep_io(engine: Engine) -> float:
    """Tokens loaded of those visible since `clear`, over all layers."""
    counts = [handle.storage.ledger.counts() for handle in engine.cache.handles]
    return float(sum(c.union.sum() for c in counts) / sum(c.context.sum() for c in counts))


def time_transformers(model: Any, batch: int, tokens: int, backend: SDPBackend | None, bandwidth: float) -> Row:
    """Time a bare forward loop over a `DynamicCache`: dense decoding as transformers ships it."""
    from transformers import DynamicCache

    model.set_attn_implementation("sdpa")
    text = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=model.config)
    shape = (batch, text.num_key_value_heads, tokens, text.head_dim)
    for layer in range(text.num_hidden_layers):
        keys, values = (torch.randn(shape, dtype=model.dtype, device="cuda") for _ in range(2))
        cache.update(keys, values, layer)
    token = torch.ones(batch, 1, dtype=torch.long, device="cuda")
    times = []
    with torch.inference_mode(), nullcontext() if backend is None else sdpa_kernel(backend):
        for _ in range(_EAGER_STEPS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            token = next_token(model(token, use_cache=True, **{cache_keyword(model): cache}).logits)
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
    name = "paper-default" if backend is None else "paper-flash"
    row = make_row(name, Dense(), batch, tokens, 1.0, 1.0, "eager", statistics.median(times[2:]), model, bandwidth)
    del cache
    release()
    return row


def next_token(logits: Tensor) -> Tensor:
    """Greedy choice, [B, 1]."""
    return logits[:, -1].argmax(dim=-1, keepdim=True)


def make_row(
    protocol: str,
    method: Method,
    batch: int,
    tokens: int,
    target: float,
    kept: float,
    timing: str,
    milliseconds: float,
    model: Any,
    bandwidth: float,
) -> Row:
    """Put a measured time beside its floor."""
    size = weight_bytes(model) + cache_bytes(model, method, batch, tokens, kept)
    floor = 1e3 * size / bandwidth
    return Row(
        protocol=protocol,
        method=method.name,
        B=batch,
        T=tokens,
        kept_target=target,
        kept=kept,
        timing=timing,
        ms_per_step=milliseconds,
        tokens_per_second=1e3 * batch / milliseconds,
        bytes=size,
        floor_ms=floor,
        over_floor=milliseconds / floor,
    )


def release() -> None:
    """Give memory back before the next row."""
    gc.collect()
    torch.cuda.empty_cache()


def measure(config: Any, grid: list[tuple[int, int]], kept: list[float], bandwidth: float) -> Iterator[dict[str, Any]]:
    """All rows of a grid of (B, T), as they are measured."""
    model = random_model(config)
    for batch, tokens in grid:
        yield asdict(time_engine(model, Dense(), batch, tokens, 1.0, bandwidth))
        for fraction in kept:
            yield asdict(time_engine(model, FFD(), batch, tokens, fraction, bandwidth))
        for backend in (None, SDPBackend.FLASH_ATTENTION):
            yield asdict(time_transformers(model, batch, tokens, backend, bandwidth))
