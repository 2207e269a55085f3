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
        stops = self._stop.clamp(min=0)
        forbidden = (self._new_tokens < self._min_new_tokens) & (self._stop >= 0)[None]
        penalty = torch.zeros_like(logits, dtype=torch.float32)
        penalty.index_add_(1, stops, torch.where(forbidden, -torch.inf, 0.0).expand(logits.shape[0], -1))
        token = (logits.float() + penalty).argmax(dim=-1, keepdim=True)
        self.token.copy_(token)
        self.generated.scatter_(1, self._new_tokens.expand_as(token), token)
        stopped = (token == self._stop[None]).any(dim=1)
        active.mul_((~stopped).int())
        self._new_tokens.add_(1)
        self.position.add_(1)

    def collect(self, new_tokens: int, stops: Collection[int]) -> list[list[int]]:
        """The first ``new_tokens`` tokens of each row, up to and with its first stop token."""
        rows: list[list[int]] = self.generated[:, :new_tokens].tolist()
        for row in rows:
            end = next((i for i, token in enumerate(row) if token in stops), None)
            if end is not None:
                del row[end + 1 :]
        return rows
