"""``bench.*``: the grids that runner=kernel and runner=throughput time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from experiments.checks import boolean, choice, integer, refusal, text
from experiments.throughput.cases import PROTOCOLS
from experiments.throughput.models import GEOMETRIES

DTYPES = ("bfloat16", "float16")
L2_STATES = ("cold", "hot")
TIMINGS = ("graph", "eager")
SOURCES = ("planted", "captured")
Entry = TypeVar("Entry")
MOST_TOKENS = 1 << 24
"""Largest context that is accepted: beyond it no layer fits a GPU."""


@dataclass(frozen=True)
class BenchOptions:
    """``bench.*``; every grid is a tuple without repetitions, None where the runner's own default holds."""

    B: tuple[int, ...] | None
    """Batch sizes."""
    T: tuple[int, ...] | None
    """Context lengths in tokens, the current one included."""
    kept: tuple[float, ...] | None
    """Kept fractions in (0, 1]: union over a kv head's query heads, mean over kv heads."""
    G: tuple[int, ...]
    """Query heads per kv head (runner=kernel)."""
    Hkv: int
    """Kv heads (runner=kernel)."""
    d: tuple[int, ...]
    """Head dimensions (runner=kernel)."""
    dtype: tuple[str, ...]
    """Dtypes of queries and values (runner=kernel)."""
    l2: tuple[str, ...]
    """cold: layers take turns until the L2 cache holds none of the next one's data; hot: one layer again and again."""
    timing: tuple[str, ...]
    """graph: replay of a captured CUDA graph; eager: launched from Python."""
    stages: bool
    """Also time every launch of a fused step alone."""
    source: str
    """planted: random keys with hot blocks that set the kept fraction; captured: queries and keys of a real model."""
    traces: Path | None
    """Trace file, or folder of them, that source=captured replays."""
    geometry: str | None
    """Random weights of this geometry in place of the configured model (runner=throughput)."""
    protocols: tuple[str, ...]
    """Who decodes (runner=throughput); `experiments.throughput.cases` says what each is."""
    prefill_tokens: int
    """Longest prompt whose prefill is timed, at batch size 1; 0 for none (runner=throughput)."""


def bench_options(composed: Mapping[str, Any]) -> BenchOptions:
    """Validate ``bench.*``; raises `UsageError` naming key, value and what is accepted."""
    source = choice("bench.source", composed["source"], SOURCES)
    traces = text("bench.traces", composed["traces"], accepted="a trace file or a folder of them")
    if source == "captured" and traces is None:
        raise refusal("bench.traces", None, "a trace file, or a folder of them, with bench.source=captured")
    if source == "planted" and traces is not None:
        raise refusal("bench.source", source, "captured, the source that bench.traces is for")
    return BenchOptions(
        B=integers("bench.B", composed["B"], maximum=1 << 12, optional=True),
        T=integers("bench.T", composed["T"], maximum=MOST_TOKENS, optional=True),
        kept=fractions("bench.kept", composed["kept"]),
        G=integers("bench.G", composed["G"], maximum=64) or (),
        Hkv=integer("bench.Hkv", composed["Hkv"], minimum=1, maximum=1 << 10),
        d=integers("bench.d", composed["d"], minimum=16, maximum=256) or (),
        dtype=choices("bench.dtype", composed["dtype"], DTYPES),
        l2=choices("bench.l2", composed["l2"], L2_STATES),
        timing=choices("bench.timing", composed["timing"], TIMINGS),
        stages=boolean("bench.stages", composed["stages"]),
        source=source,
        traces=None if traces is None else Path(traces),
        geometry=None
        if composed["geometry"] is None
        else choice("bench.geometry", composed["geometry"], tuple(GEOMETRIES)),
        protocols=choices("bench.protocols", composed["protocols"], PROTOCOLS),
        prefill_tokens=integer("bench.prefill_tokens", composed["prefill_tokens"], minimum=0, maximum=MOST_TOKENS),
    )


def listed(key: str, value: Any, accepted: str) -> list[Any]:
    """One value or a list of them as a list; whether they are of the right kind is not asked here."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values:
        raise refusal(key, value, accepted)
    return values


def distinct(values: Iterable[Entry]) -> tuple[Entry, ...]:
    """Without repetitions, in the order given."""
    return tuple(dict.fromkeys(values))


def integers(key: str, value: Any, *, minimum: int = 1, maximum: int, optional: bool = False) -> tuple[int, ...] | None:
    """Whole numbers within bounds; None stands for the runner's default where that is ``optional``."""
    if value is None and optional:
        return None
    given = listed(key, value, "an integer or a list of integers")
    return distinct(integer(key, entry, minimum=minimum, maximum=maximum) for entry in given)


def fractions(key: str, value: Any) -> tuple[float, ...] | None:
    """Shares in (0, 1]; None stands for the runner's default."""
    if value is None:
        return None
    accepted = "a number in (0, 1], or a list of such numbers"
    given = listed(key, value, accepted)
    for entry in given:
        if isinstance(entry, bool) or not isinstance(entry, int | float) or not 0 < entry <= 1:
            raise refusal(key, entry, accepted)
    return distinct(map(float, given))


def choices(key: str, value: Any, accepted: tuple[str, ...]) -> tuple[str, ...]:
    """Names out of a few."""
    given = listed(key, value, f"one or more of {', '.join(accepted)}")
    return distinct(choice(key, entry, accepted) for entry in given)
