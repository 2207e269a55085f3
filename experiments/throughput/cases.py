"""What the throughput runner measures: one case per row, in the order in which they are run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ffd.methods import Method

FAIR = "fair"
"""The engine that the sparse methods use, dense too: the protocol that says what sparsity is worth."""
TRANSFORMERS = ("paper-default", "paper-flash")
"""A bare forward loop of transformers with SDPA as shipped, and with the flash backend forced; dense only."""
PROTOCOLS = (FAIR, *TRANSFORMERS)
FUSE = ("auto", "true", "false")
"""Values of the engine's ``fuse``: fused kernels around attention where the model allows it, demanded, or none."""
DEFAULT_KEPT = (0.18,)
DEFAULT_PREFILL_TOKENS = 65536
DEFAULT_POINTS = (
    (1, 4096),
    (1, 16384),
    (1, 65536),
    (1, 131072),
    (4, 16384),
    (8, 16384),
    (8, 65536),
    (16, 16384),
    (1, 262144),
)
"""(B, T) on a GPU."""
DEFAULT_TRANSFORMERS_POINTS = ((1, 16384), (1, 65536), (8, 65536))
"""Of `DEFAULT_POINTS`; a step of transformers' loop takes ten times the engine's."""
CPU_POINTS = ((1, 512), (1, 1024))
ABLATION_TOKENS = 16384
"""The graph ablation is made at batch size 1 and the length nearest to this."""


@dataclass(frozen=True)
class Case:
    """One row to measure."""

    protocol: str
    method: Method
    B: int
    T: int
    """Tokens in the cache before the timed steps."""
    kept: float | None = None
    """Target of the kept fraction; None where the method's own knobs decide."""
    fuse: str = "auto"
    prefill: bool = False
    """Also time the prefill of a prompt of ``T`` tokens."""
    ablation: bool = False
    """Also time eager steps and a graph that is captured anew for every number of complete blocks."""

    @property
    def name(self) -> str:
        """Protocol, method and what tells them apart: the row's task in ``samples.jsonl``."""
        parts = [self.protocol, self.method.label]
        if self.kept is not None and self.method.margins_per_head:
            parts.append(f"kept {self.kept:g}")
        if self.protocol == FAIR and self.fuse != "auto":
            parts.append(f"fuse {self.fuse}")
        return " ".join(parts)

    @property
    def label(self) -> str:
        """Name and point of the grid."""
        return f"{self.name} B={self.B} T={self.T}"


@dataclass(frozen=True)
class Grid:
    """Points and variants of one record."""

    points: Sequence[tuple[int, int]]
    """(B, T)."""
    kept: Sequence[float] = DEFAULT_KEPT
    """For methods with margins per head, as calibration sets them."""
    protocols: Sequence[str] = PROTOCOLS
    fuse: Sequence[str] = ("auto",)
    prefill_tokens: int = DEFAULT_PREFILL_TOKENS
    """Longest prompt whose prefill is timed, at batch size 1; 0 for none."""
    transformers_points: Collection[tuple[int, int]] | None = None
    """Points of the transformers protocols; None for all."""


def cases(grid: Grid, methods: Sequence[Method]) -> Iterator[Case]:
    """Every row of a grid: dense under the engine first, then the methods, then transformers.

    Parameters
    ----------
    grid
        What is asked for.
    methods
        Methods to time beside dense; dense itself is always there.
    """
    from ffd.methods.dense import Dense

    dense = Dense()
    others = [method for method in methods if not isinstance(method, Dense)]
    singles = [tokens for batch, tokens in grid.points if batch == 1]
    nearest = min(singles, key=lambda tokens: abs(tokens - ABLATION_TOKENS), default=None)
    for batch, tokens in grid.points:
        prefill = batch == 1 and tokens <= grid.prefill_tokens
        ablation = batch == 1 and tokens == nearest
        for fuse in grid.fuse if FAIR in grid.protocols else ():
            yield Case(FAIR, dense, batch, tokens, 1.0, fuse, prefill, False)
            for method in others:
                for kept in grid.kept if method.margins_per_head else (None,):
                    first = kept in (None, grid.kept[0])
                    yield Case(FAIR, method, batch, tokens, kept, fuse, prefill and first, ablation and first)
        for protocol in TRANSFORMERS:
            wanted = grid.transformers_points is None or (batch, tokens) in grid.transformers_points
            if protocol in grid.protocols and wanted:
                yield Case(protocol, dense, batch, tokens, 1.0, "false")
