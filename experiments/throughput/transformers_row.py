"""Dense decoding as users of transformers run it: a bare forward loop over its growing cache."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.throughput.bench import Bench
from experiments.throughput.cases import Case
from experiments.throughput.row import Row, kv_bytes
from ffd.cache import cache_keyword
from ffd.support import require_supported

_STEPS = 12
_NOT_COUNTED = 2


def transformers_row(bench: Bench, case: Case) -> Row:
    """Time the loop; each step is waited for, as generation waits for its token."""
    from transformers import DynamicCache

    model = bench.model
    model.set_attn_implementation("sdpa")
    attention = require_supported(model.config)
    shape = (case.B, attention.num_kv_heads, case.T, attention.head_dim)
    cache = DynamicCache(config=model.config)
    for layer in range(len(attention.kinds)):
        keys, values = (torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        cache.update(keys, values, layer)
    del keys, values
    resident = bench.begin_memory()
    token = torch.ones(case.B, 1, dtype=torch.long, device=model.device)
    times = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if case.protocol == "paper-flash" else nullcontext():
        for _ in range(_STEPS):
            bench.wait()
            start = time.perf_counter()
            logits = model(token, use_cache=True, **{cache_keyword(model): cache}).logits
            token = logits[:, -1].argmax(dim=-1, keepdim=True)
            bench.wait()
            times.append(1e3 * (time.perf_counter() - start))
    per_token = kv_bytes(model)
    return Row(
        **bench.point(case),
        **bench.speed(case, statistics.median(times[_NOT_COUNTED:]), case.B * case.T * per_token),
        kept=1.0,
        timing="eager",
        fused=[],
        dense_kv_bytes_per_token=per_token,
        resident_bytes=resident,
        peak_bytes=bench.peak_memory(),
    )
