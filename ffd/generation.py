"""What a decode run returns."""

from __future__ import annotations

from dataclasses import dataclass

from ffd.report import LedgerReport


@dataclass(frozen=True)
class Generation:
    """Outcome of one `Engine.generate` call."""

    tokens: list[list[int]]
    """Generated ids per row, the stop token included."""
    finite: list[bool]
    """Per row, whether its logits predicted every token: where the largest is not finite the row ends, with token 0 in
    place of a prediction."""
    prefill_seconds: float
    """Prompt forward, the method's quantisation included."""
    ttft_seconds: float
    """Start of the call to the first token on the host."""
    decode_seconds: float
    """Decode steps that were not probed."""
    timed_tokens: int
    """Tokens that ``decode_seconds`` produced, summed over rows."""
    probe_seconds: float
    """Probed decode steps, the probe's own work included."""
    decode_steps: int
    """Decode steps that count: new tokens less one, summed over rows."""
    ledger: LedgerReport
    """What the decode steps read, from the device counters."""
