"""The metrics by name: unit, what makes an observation undefined, and which need a histogram.

``docs/metrics.md`` has the definitions and says which of the paper's words each metric answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SALIENT_DELTA = 5.0
"""First definition of salient: tokens within this many nats of the exact row maximum."""
SALIENT_MASS = 0.9
"""Second definition of salient: the smallest set with this share of the exact attention mass."""
PROXY_GAP = 0.5
"""A pseudo-maximum more than this many nats below the exact maximum is a proxy-error case."""
SET_SIZES = (64, 256, 1024)
"""Sizes m of set recall."""
TOP_FRACTION = 0.05
"""Share of a row's tokens, by exact score, in the Spearman correlation of the top."""


@dataclass(frozen=True)
class Metric:
    """One quantity observed per decode step, layer, row and query head."""

    name: str
    unit: Literal["ratio", "nat", "correlation"]
    undefined: str
    """When an observation has no value; becomes the reason of a null."""
    strict: bool = False
    """Whether one undefined observation voids the aggregate: what must not be averaged away (a NaN output)."""
    histogram: Literal["magnitude", "signed"] | None = None
    """Bins of the histogram behind the percentiles over steps; None where none is kept."""


_EMPTY = "a head attended to nothing or its scores were not finite"
_OUTPUT = "an attention output was not finite, or the dense one was zero"
_MAXIMUM = "the method estimates no row maximum"
_RANKS = "the selector made no estimate of at least two tokens that differ"

METRICS: tuple[Metric, ...] = (
    Metric("keep_head", "ratio", "no token visible", strict=True),
    Metric("keep_io", "ratio", "no token visible", strict=True),
    Metric("mass_recall", "ratio", _EMPTY, strict=True),
    Metric("mass_recall_selected", "ratio", _EMPTY, strict=True),
    *(Metric(f"set_recall_{m}", "ratio", f"fewer than {m} tokens visible") for m in SET_SIZES),
    Metric("set_recall_own_size", "ratio", "a head attended to nothing"),
    Metric("salient_hit_delta", "ratio", _EMPTY, strict=True),
    Metric("salient_hit_delta_selected", "ratio", _EMPTY, strict=True),
    Metric("salient_hit_mass", "ratio", _EMPTY, strict=True),
    Metric("output_cos", "ratio", _OUTPUT, strict=True),
    Metric("output_rel_error", "ratio", _OUTPUT, strict=True),
    Metric("executor_rel_error", "ratio", "the output was not finite, or the reference one was zero", strict=True),
    Metric("lse_error", "nat", _EMPTY, strict=True, histogram="magnitude"),
    Metric("lse_omitted", "nat", _EMPTY, strict=True, histogram="magnitude"),
    Metric("lse_quantisation", "nat", _EMPTY, strict=True, histogram="magnitude"),
    Metric("lse_quantisation_signed", "nat", _EMPTY, strict=True),
    Metric("spearman", "correlation", _RANKS),
    Metric("spearman_page", "correlation", _RANKS),
    Metric("spearman_top", "correlation", _RANKS),
    Metric("estimate_missing", "ratio", "no token visible", strict=True),
    Metric("estimate_constant", "ratio", "no token has an estimate"),
    Metric("pseudo_max_gap", "nat", _MAXIMUM, histogram="signed"),
    Metric("false_negatives", "ratio", "the method tests no margin"),
    Metric("proxy_error_cases", "ratio", _MAXIMUM),
    Metric("keep_head_proxy_error", "ratio", f"{_MAXIMUM}, or none was more than {PROXY_GAP} nat too low"),
    Metric("salient_hit_proxy_error", "ratio", f"{_MAXIMUM}, or none was more than {PROXY_GAP} nat too low"),
    Metric("keep_head_regular", "ratio", f"{_MAXIMUM}, or all were more than {PROXY_GAP} nat too low"),
    Metric("salient_hit_regular", "ratio", f"{_MAXIMUM}, or all were more than {PROXY_GAP} nat too low"),
)

INDEX = {metric.name: position for position, metric in enumerate(METRICS)}
"""Row of each metric in a state's tensors."""
