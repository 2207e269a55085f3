"""The likeliest token of each row and what follows from it, in two launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import follow_previous_launch
from ffd.kernels.launch import hardware, padded

_CHUNK = 2048


@triton.jit
def _chunk_best_kernel(
    logits_ptr, stops_ptr, new_tokens_ptr, min_new_ptr, best_ptr, index_ptr, vocabulary, stride,
    STOPS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, B). logits [B, vocabulary]; best fp32, +inf for NaN; index int32 [B, chunks]."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    follow_previous_launch(PDL)
    o_v = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride + o_v, mask=o_v < vocabulary, other=float("-inf"))
    logits = logits.to(tl.float32)
    logits = tl.where(logits < float("inf"), logits, float("inf"))  # a maximum may pass over NaN
    if tl.load(new_tokens_ptr) < tl.load(min_new_ptr):
        for i in range(STOPS):
            forbidden = (o_v == tl.load(stops_ptr + i)) & (logits < float("inf"))
            logits = tl.where(forbidden, float("-inf"), logits)
    best = tl.max(logits, 0)
    first = tl.min(tl.where(logits == best, o_v, vocabulary - 1), 0)
    slot = row * tl.num_programs(0) + chunk
    tl.store(best_ptr + slot, best)
    tl.store(index_ptr + slot, first)


@triton.jit
def _advance_kernel(
    best_ptr, index_ptr, stops_ptr, new_tokens_ptr, token_ptr, generated_ptr, active_ptr, position_ptr,
    chunks, rows, capacity, vocabulary,
    STOPS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (1,): all rows, so that the one counter of new tokens has one reader and writer."""
    follow_previous_launch(PDL)
    o_b = tl.arange(0, ROWS)
    o_c = tl.arange(0, CHUNKS)
    m_b = o_b < rows
    m_bc = m_b[:, None] & (o_c < chunks)[None, :]
    o_bc = o_b[:, None] * chunks + o_c[None, :]
    b_best = tl.load(best_ptr + o_bc, mask=m_bc, other=float("-inf"))
    b_index = tl.load(index_ptr + o_bc, mask=m_bc, other=0)
    best = tl.max(b_best, 1)
    finite = tl.abs(best) < float("inf")
    token = tl.min(tl.where(m_bc & (b_best == best[:, None]), b_index, vocabulary - 1), 1)
    token = tl.where(finite, token, 0)
    new = tl.load(new_tokens_ptr)
    position = tl.load(position_ptr + o_b, mask=m_b, other=0)
    active = tl.load(active_ptr + o_b, mask=m_b, other=0)
    stops = tl.load(stops_ptr + tl.arange(0, STOPS))
    stopped = tl.max(((token[:, None] == stops[None, :]) | (finite[:, None] == 0)).to(tl.int32), 1)
    tl.debug_barrier()  # every thread has read the counter before one of them counts on
    tl.store(token_ptr + o_b, token.to(tl.int64), mask=m_b)
    slot = o_b.to(tl.int64) * capacity + tl.minimum(new, capacity - 1)
    tl.store(generated_ptr + slot, tl.where(finite, token, -1).to(tl.int64), mask=m_b)
    tl.store(active_ptr + o_b, active * (1 - stopped), mask=m_b)
    tl.store(position_ptr + o_b, position + 1, mask=m_b)
    tl.store(new_tokens_ptr, new + 1)


def greedy_choice(
    logits: Tensor,
    stops: Tensor,
    min_new_tokens: Tensor,
    new_tokens: Tensor,
    token: Tensor,
    generated: Tensor,
    active: Tensor,
    position: Tensor,
) -> None:
    """Choose each row's likeliest token, the first of equals, and advance the decode state in place.

    A row whose largest logit is not finite (NaN is the largest) has no prediction: see `ffd.greedy.GreedyState.choose`.

    Parameters
    ----------
    logits
        [B, vocabulary] in any floating type, contiguous in the vocabulary.
    stops
        int64 [S], S a power of two; unused places hold -1. None is chosen before ``min_new_tokens`` were.
    min_new_tokens, new_tokens
        int64, one element; the latter is counted on.
    token, position
        int64 [B, 1]; written, 0 where none is predicted, and moved on by one.
    generated
        int64 [B, capacity]; the token, or -1 where none is predicted, goes to column ``new_tokens``.
    active
        int32 [B]; zero from a stop token, or a token that is not predicted, on.
    """
    gpu = hardware(logits.device)
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, _CHUNK)
    best = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    index = active.new_empty((rows, chunks))
    options = {"PDL": gpu.dependent_launch, **gpu.launch_options}
    _chunk_best_kernel[(chunks, rows)](
        logits, stops, new_tokens, min_new_tokens, best, index, vocabulary, logits.stride(0),
        STOPS=stops.shape[0], CHUNK=_CHUNK, num_warps=4, **options,
    )  # fmt: skip
    _advance_kernel[(1,)](
        best, index, stops, new_tokens, token, generated, active, position,
        chunks, rows, generated.shape[1], vocabulary,
        STOPS=stops.shape[0], CHUNKS=padded(chunks, 1), ROWS=padded(rows, 1), num_warps=4, **options,
    )  # fmt: skip
