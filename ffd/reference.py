"""Masked attention over given scores and the selection rules, in fp32: definition, oracle and CPU executor.

Nothing here is fast and everything is plain: kernels are tested against it, and runs without a GPU
use it. Scores are in natural units (``q . k * scale``) everywhere in this module.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_heads(q: Tensor, num_kv_heads: int) -> Tensor:
    """View query heads as groups of their kv head: [B, Hq, ...] -> [B, Hkv, G, ...]."""
    return q.unflatten(1, (num_kv_heads, -1))


def key_scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Scores of every key.

    Parameters
    ----------
    q
        [B, Hq, d].
    keys
        [B, Hkv, N, d].
    scale
        Softmax scale, usually ``d ** -0.5``.

    Returns
    -------
    Tensor
        float32 [B, Hq, N] in natural units.
    """
    grouped = group_heads(q.float(), keys.shape[1])
    return (grouped @ keys.float().transpose(-1, -2)).flatten(1, 2) * scale


def visible(lengths: Tensor, num_tokens: int) -> Tensor:
    """Mask of the tokens each row holds: int [B] -> bool [B, num_tokens]."""
    return torch.arange(num_tokens, device=lengths.device) < lengths[:, None]


def masked_attention(scores: Tensor, attended: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention over the attended tokens.

    Parameters
    ----------
    scores
        float32 [B, Hq, N], natural units; entries that are not attended may hold anything, NaN included.
    attended
        bool [B, Hq, N].
    values
        [B, Hkv, N, d]; rows no head attends to may hold anything.

    Returns
    -------
    out : Tensor
        float32 [B, Hq, d]; zero for a row that attends to nothing.
    logsumexp : Tensor
        float32 [B, Hq], natural units; -inf for a row that attends to nothing.
    """
    masked = scores.float().masked_fill(~attended, -torch.inf)
    logsumexp = torch.logsumexp(masked, dim=-1)
    weights = torch.exp(masked - torch.where(logsumexp.isinf(), 0.0, logsumexp)[..., None])
    num_kv_heads = values.shape[1]
    # Stale slots may hold NaN, and 0 * NaN is NaN: values no head of the group attends to are cleared.
    used = group_heads(attended, num_kv_heads).any(dim=2)
    out = group_heads(weights, num_kv_heads) @ cleared(values, used).float()
    return out.flatten(1, 2), logsumexp


def cleared(values: Tensor, used: Tensor) -> Tensor:
    """Zero the values [B, Hkv, N, d] of tokens that are not ``used``, bool [B, Hkv, N]."""
    strides = (values.shape[-1], *values.stride()[:-1], values.storage_offset())
    if values.stride(-1) == 1 and all(n * values.itemsize % 8 == 0 for n in strides):
        # Eight bytes at a time, zero in either type: to spread a mask over channels is slow, of a whole cache.
        return values.view(torch.int64).masked_fill(~used[..., None], 0).view(values.dtype)
    return values.masked_fill(~used[..., None], 0.0)


def near_tokens(lengths: Tensor, num_tokens: int, n_sink: int, n_local: int) -> Tensor:
    """Sink and local tokens of each row, bool [B, num_tokens]; the local window ends with the current token."""
    position = torch.arange(num_tokens, device=lengths.device)
    n = lengths[:, None]
    return ((position < n_sink) | (position >= n - n_local)) & (position < n)


def pseudo_max(scores: Tensor, lengths: Tensor, n_sink: int, n_local: int) -> Tensor:
    """Largest score among the sink and the local tokens (FFD paper, section 3.2).

    Parameters
    ----------
    scores
        float32 [B, Hq, N].
    lengths
        int [B]: tokens visible to each row, the current one included.
    n_sink, n_local
        First and last tokens that take part, see `near_tokens`.

    Returns
    -------
    Tensor
        float32 [B, Hq].
    """
    near = near_tokens(lengths, scores.shape[-1], n_sink, n_local)
    return scores.masked_fill(~near[:, None, :], -torch.inf).amax(dim=-1)


def unit_max(scores: Tensor, candidates: Tensor, unit: int) -> Tensor:
    """Largest candidate score in each run of ``unit`` tokens.

    Parameters
    ----------
    scores
        float32 [B, Hq, N].
    candidates
        bool, broadcastable to [B, Hq, N]; others do not count.
    unit
        Tokens per sub-block, block or page; N need not be a multiple.

    Returns
    -------
    Tensor
        float32 [B, Hq, ceil(N / unit)]; -inf where a run holds no candidate.
    """
    masked = scores.masked_fill(~candidates, -torch.inf)
    padding = -masked.shape[-1] % unit
    masked = torch.nn.functional.pad(masked, (0, padding), value=-torch.inf)
    return masked.unflatten(-1, (-1, unit)).amax(dim=-1)


def expand_units(kept_units: Tensor, unit: int, num_tokens: int) -> Tensor:
    """Token mask of kept units: bool [B, H, n] -> bool [B, H, num_tokens]."""
    return kept_units.repeat_interleave(unit, dim=-1)[..., :num_tokens]


def union_over_group(selected: Tensor, num_kv_heads: int) -> Tensor:
    """What a kv head must load: the union of its query heads' choices, bool [B, Hq, N] -> [B, Hkv, N]."""
    return group_heads(selected, num_kv_heads).any(dim=2)


def attend_union(selected: Tensor, num_kv_heads: int) -> Tensor:
    """Give every query head the union of its group's choices: bool [B, Hq, N] -> [B, Hq, N]."""
    return share_with_group(union_over_group(selected, num_kv_heads), selected.shape[1])


def share_with_group(union: Tensor, num_query_heads: int) -> Tensor:
    """Give every query head its kv head's set: bool [B, Hkv, N] -> [B, Hq, N]."""
    return union.repeat_interleave(num_query_heads // union.shape[1], dim=1)
