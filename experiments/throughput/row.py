"""One measurement as it is recorded, and what its floor is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ffd.support import require_supported


@dataclass(frozen=True)
class Row:
    """One measurement; the fields of the committed record. What was not measured is None."""

    device: str
    """Name of the GPU, or cpu."""
    protocol: str
    """fair (the engine), paper-default, paper-flash."""
    method: str
    B: int
    T: int
    """Tokens in the cache before the timed steps."""
    kept_target: float | None
    """None where the method's own knobs decide."""
    kept: float
    """Counted by the ledger over the timed steps: union per kv head, over all layers."""
    timing: str
    """graph or eager."""
    fuse: str
    """Whether the engine was to fuse the operations around attention: auto, true or false."""
    fused: list[str]
    """What it fused."""
    ms_per_step: float
    tokens_per_second: float
    """Of all rows of the batch."""
    bytes: float
    """Weights, and what the method must read of its storage by the ledger's counts."""
    floor_ms: float
    """``bytes`` over the measured read bandwidth."""
    over_floor: float
    """``ms_per_step / floor_ms``."""
    kv_bytes_per_token: float | None = None
    """Bytes allocated for one row's token in all layers, measured: storage over rows and capacity."""
    dense_kv_bytes_per_token: float | None = None
    """Keys and values in the model's dtype."""
    resident_bytes: int | None = None
    """GPU memory in use before the timed steps: weights, cache, scratch."""
    peak_bytes: int | None = None
    """Most GPU memory in use during them."""
    store_ms: float | None = None
    """Storing ``T`` tokens in all layers: a copy for dense, the method's thumbnails, codes or bounds besides."""
    prefill_ms: float | None = None
    """A prompt of ``T`` random tokens, storing included."""
    ttft_ms: float | None = None
    """The same up to the first token on the host."""
    prefill_peak_bytes: int | None = None
    """Most GPU memory in use during it."""
    graph_ablation: dict[str, float] | None = None
    """Milliseconds a step: eager, one graph for all lengths, and captured anew whenever a block is complete."""


def kv_bytes(model: Any) -> int:
    """Bytes of one token's keys and values in the model's dtype, all layers."""
    shape = require_supported(model.config)
    return 2 * len(shape.kinds) * shape.num_kv_heads * shape.head_dim * int(model.dtype.itemsize)


def weight_bytes(model: Any) -> float:
    """Bytes of weights that a decode step reads: all but the input embedding's table, of which it reads a row."""
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return float(total if tied else total - embedding.numel() * embedding.element_size())
