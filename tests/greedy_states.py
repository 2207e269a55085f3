"""Logits without a finite largest one, before the torch path and the fused path of the greedy choice."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ffd.greedy import MAX_STOP_TOKENS, GreedyState

ALL_STOPS = list(range(100, 100 + MAX_STOP_TOKENS))
"""As many as there may be: no place for one is unused."""
CHOSEN = 42
BROKEN = (math.nan, math.inf)


def broken_logits(value: float, vocabulary: int, device: str) -> tuple[Tensor, list[bool]]:
    """Rows that hold ``value`` at their beginning, middle, end, a stop token and throughout; one of -inf; two without.

    Returns
    -------
    logits : Tensor
        bf16 [8, vocabulary]; the last two choose ``CHOSEN``, one of them before a stop token that is not allowed.
    finite : list[bool]
        Which rows have a prediction.
    """
    logits = torch.randn(8, vocabulary, device=device).bfloat16()
    logits[:, CHOSEN] = 20.0
    for row, place in enumerate((0, vocabulary // 2, vocabulary - 1, ALL_STOPS[-1])):
        logits[row, place] = value
    logits[4] = value
    logits[5] = -math.inf
    logits[7, ALL_STOPS[3]] = 30.0
    return logits, [False] * 6 + [True] * 2


def assert_broken_rows_end(value: float, stops: list[int], vocabulary: int, device: str) -> None:
    """Both paths note that nothing was predicted, feed token 0 and end the row; the other rows go on."""
    torch.manual_seed(0)
    logits, finite = broken_logits(value, vocabulary, device)
    rows = len(finite)
    kept = []
    for fused in (False, True):
        state = GreedyState(rows, 4, torch.device(device), fused)
        active = torch.ones(rows, dtype=torch.int32, device=device)
        state.begin(range(rows), stops, 2)
        state.choose(logits, active)
        assert state.generated[:, 0].tolist() == [CHOSEN if x else -1 for x in finite]
        assert state.token[:, 0].tolist() == [CHOSEN if x else 0 for x in finite]
        assert active.tolist() == [int(x) for x in finite]
        state.choose(logits.flip(0), active)
        state.choose(torch.full_like(logits, value), active)
        assert active.tolist() == [0] * rows
        assert state.collect(3, stops) == ([[0]] * 6 + [[CHOSEN, 0]] * 2, [False] * rows)
        assert state.collect(1, stops)[1] == finite
        kept.append((state.generated, state.token, state.position, state._new_tokens))
    for torch_path, kernel in zip(*kept, strict=True):
        assert torch.equal(torch_path, kernel)
