"""Prompts of a batch on their way to a model: whether they fit, their padding on the left, and their chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def require_room(lengths: Sequence[int], max_new_tokens: int, *, rows: int, capacity: int) -> None:
    """Refuse prompts that an engine cannot continue.

    Parameters
    ----------
    lengths
        Tokens of each row's prompt.
    max_new_tokens
        Tokens to generate at most; the last one is never stored.
    rows, capacity
        Rows that are decoded together, and tokens that one can hold.

    Raises
    ------
    ValueError
        If a prompt is empty, the rows do not match, or prompt and new tokens exceed the capacity.
    """
    if len(lengths) != rows or not all(lengths):
        raise ValueError(f"prompt lengths {list(lengths)}: expected {rows} rows of at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: expected at least 1")
    if max(lengths) + max_new_tokens - 1 > capacity:
        raise ValueError(f"prompt of {max(lengths)} and max_new_tokens={max_new_tokens} exceed capacity={capacity}")


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Prompts as one batch: their last tokens stand in one column, from which all rows decode on.

    Parameters
    ----------
    prompts
        Token ids of each row, at least one.
    device
        Where the model runs.

    Returns
    -------
    ids : Tensor
        int64 [B, T], T the longest prompt; zeros as padding.
    positions : Tensor
        int64 [B, T]: each token's place in its own prompt.
    mask : Tensor or None
        bool [B, T]: False for padding; None where there is none.

    Raises
    ------
    ValueError
        If a prompt is anything but token ids.
    """
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        try:
            ids[row, width - len(prompt) :] = torch.tensor(list(prompt), dtype=torch.long)
        except (TypeError, ValueError):
            kind = type(prompt[0]).__name__
            raise ValueError(f"prompt {row}: expected token ids, as a tokenizer gives; its first is a {kind}") from None
        mask[row, width - len(prompt) :] = True
    positions = (mask.cumsum(dim=1) - 1).clamp_(min=0).to(device)
    padding = None if bool(mask.all()) else mask.to(device)
    return ids.to(device), positions, padding


def in_chunks(
    ids: Tensor, positions: Tensor, mask: Tensor | None, tokens: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """A padded batch a few columns at a time, as a cache takes it.

    Parameters
    ----------
    ids, positions, mask
        What `left_padded` gives.
    tokens
        Columns at a time, at least 1; the last chunk may have fewer.

    Yields
    ------
    ids, positions : Tensor
        [B, n], the chunk's own.
    mask : Tensor or None
        bool [B, N]: of all columns so far, since the chunk attends to those before it too.
    """
    for start in range(0, ids.shape[1], tokens):
        stop = start + tokens
        yield ids[:, start:stop], positions[:, start:stop], None if mask is None else mask[:, :stop]
