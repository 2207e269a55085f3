"""What one generation request left: its text, and what its decode steps read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Answer:
    """One finished generation request."""

    task: str
    index: int
    """Number of the request among its task's generation requests, from 0: the document's number in tasks with one
    request per document."""
    document: int
    """lm-eval's ``doc_id``."""
    text: str
    """Cut at the task's stop strings, as lm-eval scores it."""
    prompt_fingerprint: str
    """Hex sha256 of the prompt text."""
    bos_count: int
    """BOS tokens the prompt begins with."""
    truncated: bool
    """Whether lm-eval cut the prompt's beginning to fit the model's context."""
    prompt_tokens: int
    new_tokens: int
    finite: bool
    """Whether the largest logit was a finite number at every token."""
    seconds: float
    ttft_seconds: float
    """Start of generation to the first token on the host."""
    decode_seconds: float
    """First token to the last."""
    ledger: Mapping[str, Any]
    """`ffd.report.LedgerReport.totals` of this request alone."""


class Journal(Protocol):
    """Keeps answers as they finish, so that an interrupted evaluation goes on where it stopped."""

    def recall(self, task: str, index: int) -> str | None:
        """Text of an answer that an earlier process finished, or None."""

    def record(self, answer: Answer) -> None:
        """Keep an answer."""


def measured(answers: Iterable[Answer]) -> dict[str, Any]:
    """Decode layer-steps by path, and the share of tokens loaded, summed over answers.

    Returns
    -------
    dict
        ``requests, not_finite, sparse_steps, dense_steps, expected_steps, keep_io``; the second counts requests with a
        prediction that was not finite, the last is None where nothing was decoded.
    """
    requests = not_finite = sparse = dense = expected = 0
    union = context = 0.0
    for answer in answers:
        ledger = answer.ledger
        requests += 1
        not_finite += not answer.finite
        sparse += ledger["sparse_steps"]
        dense += ledger["dense_steps"]
        expected += ledger["expected_steps"]
        for layer in ledger["layers"]:
            context += layer["context"]
            union += sum(layer["union"]) / len(layer["union"])
        context += ledger["sliding_context"]
        union += ledger["sliding_context"]
    return {
        "requests": requests,
        "not_finite": not_finite,
        "sparse_steps": sparse,
        "dense_steps": dense,
        "expected_steps": expected,
        "keep_io": union / context if context else None,
    }
