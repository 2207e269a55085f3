"""What follows the prompts of a batch: tokens that are given, or the ones that an engine's logits make likeliest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ffd.greedy import GreedyState


class Continuation(ABC):
    """Tokens after the prompts, one of each row at a time, each known when the logits that predict it are.

    It serves one batch of prompts after the other, each begun with `begin`.

    Parameters
    ----------
    longest
        Tokens that follow a prompt at most.
    """

    token: Tensor
    """int64 [B, 1]: the tokens that followed last; the next ones may overwrite it."""
    position: Tensor
    """int64 [B, 1]: their positions."""
    active: Tensor
    """int32 [B]: 0 for rows that end with them or have ended before."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.taken = 0
        """Tokens that have followed so far, those of rows that have ended included."""

    @abstractmethod
    def begin(self, lengths: Sequence[int], device: torch.device, fused: bool) -> None:
        """Forget everything; prompts of these lengths are next.

        Parameters
        ----------
        lengths
            Tokens of each row's prompt.
        device
            Where logits come from.
        fused
            Choose with the fused kernel, if there is a choice, as `ffd.engine.Engine` does.
        """

    @abstractmethod
    def follow(self, logits: Tensor) -> None:
        """Go on by one token of each row, which these logits [B, vocab] predicted."""

    @abstractmethod
    def over(self, look: bool) -> bool:
        """Whether all rows have ended.

        Parameters
        ----------
        look
            Wait for the device to say so, where only the device knows; without it a later call says it.
        """

    @property
    @abstractmethod
    def tokens(self) -> list[list[int]]:
        """Token ids that followed each prompt, on the host; complete once `over`."""


class GivenTokens(Continuation):
    """Tokens of a text.

    Parameters
    ----------
    rows
        Token ids that follow each prompt, at least one.

    Raises
    ------
    ValueError
        If a row has none.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        ends = [len(row) for row in rows]
        if not ends or min(ends) < 1:
            raise ValueError(f"continuations of {ends} tokens: expected at least one token for each row")
        super().__init__(max(ends))
        self._rows = [list(row) for row in rows]
        self._ends = torch.tensor(ends)

    def begin(self, lengths: Sequence[int], device: torch.device, fused: bool) -> None:
        """See `Continuation.begin`; raises `ValueError` for another number of prompts."""
        if len(lengths) != len(self._rows):
            raise ValueError(f"{len(self._rows)} continuations: expected one for each of {len(lengths)} rows")
        self.taken = 0
        self._padded = torch.tensor([row + [0] * (self.longest - len(row)) for row in self._rows], device=device)
        self._going_on = (self._ends > torch.arange(1, self.longest + 1)[:, None]).int().to(device)
        self.position = torch.tensor(lengths, device=device)[:, None] - 1

    def follow(self, logits: Tensor) -> None:
        """See `Continuation.follow`; the logits do not matter."""
        self.token = self._padded[:, self.taken : self.taken + 1]
        self.active = self._going_on[self.taken]
        self.position += 1
        self.taken += 1

    @property
    def tokens(self) -> list[list[int]]:
        """As given."""
        return self._rows

    def over(self, look: bool) -> bool:
        """Whether the longest row has ended."""
        return self.taken == self.longest


class GreedyTokens(Continuation):
    """The likeliest token at each step: what `ffd.engine.Engine.generate` would answer by the same logits.

    Parameters
    ----------
    max_new_tokens
        Tokens to choose at most, the stop token included.
    stop_tokens
        Ids that end a row.
    min_new_tokens
        Stop tokens cannot be chosen before this many tokens were.

    Raises
    ------
    ValueError
        If ``max_new_tokens`` is not positive; from `begin` if there are too many stop tokens.
    """

    def __init__(self, max_new_tokens: int, stop_tokens: Sequence[int] = (), min_new_tokens: int = 0) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: expected at least 1")
        super().__init__(max_new_tokens)
        self._stop_tokens = frozenset(stop_tokens)
        self._min_new_tokens = min_new_tokens

    def begin(self, lengths: Sequence[int], device: torch.device, fused: bool) -> None:
        """See `Continuation.begin`; raises `ValueError` for too many stop tokens."""
        self.taken = 0
        self._state = GreedyState(len(lengths), self.longest, device, fused)
        self._state.begin(lengths, tuple(self._stop_tokens), self._min_new_tokens)
        self.token, self.position = self._state.token, self._state.position
        self.active = torch.ones(len(lengths), dtype=torch.int32, device=device)

    def follow(self, logits: Tensor) -> None:
        """See `Continuation.follow`."""
        self._state.choose(logits, self.active)
        self.taken += 1

    @property
    def tokens(self) -> list[list[int]]:
        """Those chosen so far, up to and with the first stop token of each row, or token 0 where none was predicted."""
        return self._state.collect(self.taken, self._stop_tokens)[0]

    def over(self, look: bool) -> bool:
        """Whether all tokens were chosen, or all rows are seen to have stopped."""
        return self.taken == self.longest or (look and not bool(self.active.any()))
