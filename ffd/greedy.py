"""State of greedy decoding on the device, and the step from logits to the next token."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

MAX_STOP_TOKENS = 32


class GreedyState:
    """Tokens chosen so far, positions and stop tokens of a batch; fixed addresses, so that a graph can hold them.

    Parameters
    ----------
    rows, capacity
        Rows of the batch, and tokens that one can hold.
    device
        Where the model runs.
    fused
        Choose with the fused kernel instead of torch's functions.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device, fused: bool = False) -> None:
        self.fused = fused
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        """The tokens chosen last."""
        self.position = torch.zeros(rows, 1, dtype=torch.long, device=device)
        """Their positions."""
        self.generated = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        """All of them; -1 where the logits were not finite and predicted none."""
        self._new_tokens = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._stop = torch.full((MAX_STOP_TOKENS,), -1, dtype=torch.long, device=device)
        self._min_new_tokens = torch.zeros(1, 1, dtype=torch.long, device=device)

    def begin(self, lengths: Sequence[int], stop_tokens: Sequence[int], min_new_tokens: int) -> None:
        """Forget everything; the prompts have these lengths.

        Raises
        ------
        ValueError
            If there are more than ``MAX_STOP_TOKENS`` stop tokens.
        """
        if len(stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(f"{len(stop_tokens)} stop tokens: at most {MAX_STOP_TOKENS}")
        self._new_tokens.zero_()
        self.position.copy_(torch.tensor(lengths, device=self.position.device)[:, None] - 1)
        self._stop.fill_(-1)
        if stop_tokens:
            self._stop[: len(stop_tokens)] = torch.tensor(sorted(stop_tokens), device=self._stop.device)
        self._min_new_tokens.fill_(min_new_tokens)

    def choose(self, logits: Tensor, active: Tensor) -> None:
        """Take the likeliest token of each row and advance; rows that stop become inactive.

        A row whose largest logit is not finite has no prediction: it is noted as such, fed token 0, and stops. NaN
        counts as the largest wherever it stands, NaN and +inf also at the id of a stop token that is not allowed yet.

        Parameters
        ----------
        logits
            [B, vocabulary].
        active
            int32 [B], written in place.
        """
        if self.fused:
            from ffd.kernels.greedy_choice import greedy_choice

            greedy_choice(
                logits, self._stop, self._min_new_tokens, self._new_tokens,
                self.token, self.generated, active, self.position,
            )  # fmt: skip
            return
        vocabulary = logits.shape[1]
        stops = self._stop.clamp(0, vocabulary - 1)
        # An empty slot stands for no token, and a model may have fewer than its tokenizer has.
        possible = (self._stop >= 0) & (self._stop < vocabulary)
        forbidden = (self._new_tokens < self._min_new_tokens) & possible[None]
        penalty = torch.zeros_like(logits, dtype=torch.float32)
        ruled_out = penalty.new_zeros(forbidden.shape).masked_fill(forbidden, -torch.inf)
        penalty.index_add_(1, stops, ruled_out.expand(logits.shape[0], -1))
        # To torch NaN is larger than all numbers, and +inf under a penalty of -inf is NaN.
        largest, token = (logits.float() + penalty).max(dim=-1, keepdim=True)
        finite = largest.abs() < torch.inf
        token = torch.where(finite, token, 0)
        self.token.copy_(token)
        self.generated.scatter_(1, self._new_tokens.expand_as(token), torch.where(finite, token, -1))
        stopped = ((token == self._stop[None]) | ~finite).any(dim=1)
        active.mul_((~stopped).int())
        self._new_tokens.add_(1)
        self.position.add_(1)

    def collect(self, new_tokens: int, stops: Collection[int]) -> tuple[list[list[int]], list[bool]]:
        """What the first ``new_tokens`` choices came to.

        Returns
        -------
        tokens : list[list[int]]
            Of each row, up to and with its first stop token, or the token 0 it was fed where none was predicted.
        finite : list[bool]
            Of each row, whether all of these were predicted.
        """
        rows: list[list[int]] = self.generated[:, :new_tokens].tolist()
        finite = []
        for row in rows:
            end = next((i for i, token in enumerate(row) if token < 0 or token in stops), None)
            if end is not None:
                del row[end + 1 :]
            predicted = end is None or row[end] >= 0
            finite.append(predicted)
            if not predicted:
                row[-1] = 0
        return rows, finite
