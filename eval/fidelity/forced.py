"""Teacher-forced perplexity, and the KL divergence of the next-token distribution from dense, by position.

The most sensitive accuracy signal where tasks saturate: every decode step counts, not only those
whose likeliest token changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ffd import Engine
    from ffd.continuation import Continuation

_LARGEST_EXPONENT = 700.0  # exp overflows a little later
_TOGETHER = 16
"""Predictions compared at once: two dozen small launches a step otherwise, more than a step of a small model takes."""
_SUMS = ("count", "nll", "dense_nll", "kl", "agreement")


@dataclass
class ForcedScores:
    """Sums by position in the continuation; position ``i`` is its token ``i + 1``.

    Token 0 is left out: prefill predicts it, exactly, under every method.
    """

    count: list[int] = field(default_factory=list)
    """Tokens predicted at each position."""
    nll: list[float] = field(default_factory=list)
    """Negative log-likelihood of the given token under the method, nats."""
    dense_nll: list[float] = field(default_factory=list)
    """The same under dense attention."""
    kl: list[float] = field(default_factory=list)
    """KL(dense || method) of the next-token distributions, nats."""
    agreement: list[int] = field(default_factory=list)
    """Predictions whose likeliest token is dense's."""
    kl_max: float = 0.0
    """Largest KL of a single prediction."""
    broken_prefills: int = 0
    """Rows without a finite largest logit for token 0, after which nothing may follow that shows it."""

    def merge(self, other: ForcedScores) -> ForcedScores:
        """The scores of both, position by position."""
        size = max(len(self.count), len(other.count))

        def padded(values: Sequence[Any]) -> list[Any]:
            return [*values, *[0] * (size - len(values))]

        sums = {
            name: [a + b for a, b in zip(padded(getattr(self, name)), padded(getattr(other, name)), strict=True)]
            for name in _SUMS
        }
        # Python's max drops a NaN that comes second, and a mean that is NaN would stand beside a largest value of 0.
        largest = max(self.kl_max, other.kl_max, key=lambda kl: (math.isnan(kl), kl))
        return ForcedScores(**sums, kl_max=largest, broken_prefills=self.broken_prefills + other.broken_prefills)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` restores the same floats."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> ForcedScores:
        """Restore what `to_dict` gave."""
        return cls(**stored)

    def summary(self) -> dict[str, Any]:
        """Perplexities, mean and largest KL (nats), share of equal likeliest tokens; whether predictions are finite.

        A number that cannot be given is None, its reason under ``null_reasons``.
        """
        tokens = sum(self.count)
        numbers: dict[str, Any] = {"kl_max": self.kl_max if tokens else math.nan}
        for key, values in (("kl_mean", self.kl), ("top1_agreement", self.agreement)):
            numbers[key] = sum(values) / tokens if tokens else math.nan
        for key, values in (("perplexity", self.nll), ("perplexity_dense", self.dense_nll)):
            nats = sum(values) / tokens if tokens else math.nan
            numbers[key] = math.exp(nats) if nats < _LARGEST_EXPONENT else math.inf if nats > 0 else math.nan
        finite = not self.broken_prefills and (not tokens or math.isfinite(numbers["kl_mean"]))
        reason = "no token was predicted by a decode step" if finite and not tokens else "a prediction was not finite"
        missing = [key for key, value in numbers.items() if not math.isfinite(value)]
        numbers |= dict.fromkeys(missing)
        return {"tokens": tokens, "finite": finite, **numbers, "null_reasons": dict.fromkeys(missing, reason)}

    def by_position(self, width: int = 1) -> list[dict[str, float | int]]:
        """Means over runs of ``width`` positions: first position, tokens, KL, both negative log-likelihoods."""
        rows = []
        for start in range(0, len(self.count), width):
            part = slice(start, start + width)
            tokens = sum(self.count[part])
            if tokens:
                rows.append(
                    {
                        "position": start,
                        "tokens": tokens,
                        "kl": sum(self.kl[part]) / tokens,
                        "nll": sum(self.nll[part]) / tokens,
                        "dense_nll": sum(self.dense_nll[part]) / tokens,
                    }
                )
        return rows


def compare_forced(
    dense: Engine, method: Engine, prompts: Sequence[Sequence[int]], continuation: Continuation
) -> ForcedScores:
    """Feed both engines the same tokens, step by step, and compare what they predict.

    Parameters
    ----------
    dense, method
        Engines on the same model; the first with the method ``dense``, or following dense attention.
    prompts
        Token ids of each row.
    continuation
        What follows: the text, or what the first engine chooses. It has its tokens afterwards.

    Raises
    ------
    ValueError
        As `ffd.teacher.forced_logits_of_both`.
    """
    from ffd.teacher import forced_logits_of_both

    compared: list[Tensor] = []
    waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def compare() -> None:
        together = compare_predictions(*(torch.cat(part) for part in zip(*waiting, strict=True)))
        compared.append(together.unflatten(1, (len(waiting), len(prompts))))  # [4, positions, B]
        waiting.clear()

    predictions = forced_logits_of_both(dense, method, prompts, continuation)
    first = torch.stack([logits.amax(dim=-1) for logits in next(predictions)])  # of token 0, from prefill
    for expected, got in predictions:
        waiting.append((expected, got, continuation.token[:, 0].clone()))
        if len(waiting) * len(prompts) >= _TOGETHER:
            compare()
    if waiting:
        compare()
    ends = torch.tensor([len(row) for row in continuation.tokens])
    steps = int(ends.max()) - 1  # those after the end of all rows count nowhere
    broken_prefills = int((~first.isfinite()).any(dim=0).sum())
    if not steps:
        return ForcedScores(broken_prefills=broken_prefills)
    over = ends <= torch.arange(1, steps + 1)[:, None]  # [positions, B]
    values = torch.cat(compared, dim=1)[:, :steps].transpose(0, 1).cpu()  # [positions, 4, B]
    values = values.masked_fill(over[:, None], 0.0)
    sums = values.sum(dim=-1)
    return ForcedScores(
        count=(~over).sum(dim=1).tolist(),
        nll=sums[:, 0].tolist(),
        dense_nll=sums[:, 1].tolist(),
        kl=sums[:, 2].tolist(),
        agreement=[int(x) for x in sums[:, 3].tolist()],
        kl_max=float(values[:, 2].max()),
        broken_prefills=broken_prefills,
    )


def compare_predictions(expected: Tensor, got: Tensor, targets: Tensor) -> Tensor:
    """Two next-token distributions of the same rows.

    Parameters
    ----------
    expected, got
        Logits [B, vocab] of dense and of the method.
    targets
        int64 [B], the tokens that follow.

    Returns
    -------
    Tensor
        float64 [4, B]: negative log-likelihood under the method and under dense, KL(dense || method),
        and 1 where the likeliest tokens are equal.
    """
    p, q = (torch.log_softmax(x.double(), dim=-1) for x in (expected, got))
    # -inf - -inf where both rule a token out: a term of weight 0.
    terms = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q))
    chosen = targets[:, None]
    return torch.stack(
        [
            -q.gather(1, chosen)[:, 0],
            -p.gather(1, chosen)[:, 0],
            terms.sum(dim=-1).clamp(min=0),  # rounding may leave -1e-17
            (expected.argmax(dim=-1) == got.argmax(dim=-1)).double(),
        ]
    )
