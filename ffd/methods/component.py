"""Component: FFD taken apart, one grid of scan precision, selection rule and execution path.

Rule, per kv head with G query heads (the ablation of "Faster Than Flash", arXiv:2609.00097, appendix G):

1. Scan: every key of the complete blocks is scored from a copy in ``bits`` bits, FFD's quantiser at any width
   (16: from the keys themselves); the tail, up to a block of the newest tokens, exactly.
2. Select whole sub-blocks: the ``token_budget`` with the largest scores over the group (``topk``), or by any head
   of the group the smallest set with mass ``p`` (``topp``), or those within ``delta`` of FFD's pseudo-maximum, the
   largest exact score of the first ``n_sink`` and the last ``n_local`` tokens, which are tested by their exact
   scores too (``topdelta``). The tail is kept.
3. Attend exactly, over 16-bit keys, to what any head of the group keeps.

``path`` says how, and never changes what is kept. ``decoupled``: a launch writes every score to memory, another
reduces them, others select, and the attention gathers what they chose. ``fused``: the scan leaves one score per
sub-block and the attention tests them itself; a budget or a mass needs a search between the two all the same, a
margin needs nothing. The fused 2-bit margin is FFD, which also attends through its 2-bit copy: that point is
`ffd.methods.ffd` itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ffd import reference
from ffd.ledger import Counts
from ffd.methods import Executor, LayerGeometry, Method, MethodLayer, RowState, SearchKnob, Selection, require
from ffd.methods.dense import DenseLayer
from ffd.methods.ffd import FFD
from ffd.quantization import SCALE_DTYPE
from ffd.scan import scanned_tokens
from ffd.selection import at_least, pool_group, top_k, top_p_threshold, unit_logsumexp
from ffd.thumbnails import Thumbnails

BITS = (2, 4, 8, 16)
PATHS = ("fused", "decoupled")
COST_KNOBS = {
    "topdelta": SearchKnob("delta", 0.0, 32.0),
    "topk": SearchKnob("token_budget", 1, math.inf),
    "topp": SearchKnob("p", 0.01, 1.0),
}
"""Selection rules, each with the knob that decides how much it keeps."""


@dataclass(frozen=True)
class Component(Method):
    """A point of the grid; the default is FFD."""

    name: ClassVar[str] = "component"
    keep_all_knobs: ClassVar[dict[str, Any]] = {"path": "decoupled", "delta": math.inf}
    small_knobs: ClassVar[dict[str, Any]] = {
        "path": "decoupled",
        "delta": 0.25,
        "block_size": 64,
        "sub_block": 16,
        "n_sink": 4,
    }

    bits: int = 2
    """Bits per value of the scanned keys: 2, 4, 8, or 16 for the keys themselves."""
    select: str = "topdelta"
    """Selection rule: topdelta, topk or topp."""
    path: str = "fused"
    """Execution: fused or decoupled."""
    delta: float = 7.0
    """Margin of topdelta below the pseudo-maximum, natural units; infinity keeps everything."""
    token_budget: int = 1024
    """Tokens that topk keeps per kv head, in whole sub-blocks, at least one; the tail comes on top."""
    p: float = 0.9
    """Estimated softmax mass that topp keeps, in (0, 1]; 1 keeps everything."""
    block_size: int = 128
    """Tokens that share one half step per channel: 64, 128 or 256."""
    sub_block: int | None = None
    """Tokens kept or dropped together; None means `block_size`."""
    n_sink: int = 128
    """First tokens in the pseudo-maximum."""
    n_local: int = 128
    """Last tokens in the pseudo-maximum."""

    def __post_init__(self) -> None:
        require(self.bits in BITS, "bits", self.bits, "2, 4, 8 or 16")
        require(self.select in COST_KNOBS, "select", self.select, "one of " + ", ".join(COST_KNOBS))
        require(self.path in PATHS, "path", self.path, " or ".join(PATHS))
        require(
            type(self.token_budget) is int and self.token_budget >= 1,
            "token_budget",
            self.token_budget,
            "an integer >= 1",
        )
        require(isinstance(self.p, (int, float)) and 0.0 < self.p <= 1.0, "p", self.p, "a number in (0, 1]")
        self.as_ffd()  # checks what they share

    def as_ffd(self) -> FFD:
        """FFD with the same margin, blocks and pseudo-maximum; raises `KnobError` for values it does not accept."""
        return FFD(
            delta=self.delta,
            block_size=self.block_size,
            sub_block=self.sub_block,
            n_sink=self.n_sink,
            n_local=self.n_local,
        )

    @property
    def label(self) -> str:
        """The point of the grid."""
        return f"{self.name} {self.bits} bit {self.select} {self.path}"

    @property
    def cost_knob(self) -> SearchKnob:
        """The rule's own."""
        return COST_KNOBS[self.select]

    @property
    def margins_per_head(self) -> bool:
        """For the rule that has a margin."""
        return self.select == "topdelta"

    @property
    def unit(self) -> int:
        """Tokens per sub-block."""
        return self.sub_block or self.block_size

    @property
    def unit_budget(self) -> int:
        """Sub-blocks that topk keeps."""
        return max(1, self.token_budget // self.unit)

    def new_layer(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> MethodLayer:
        """Allocate FFD's storage for FFD's point, elsewhere 16-bit keys and values and the copy to scan."""
        if (self.bits, self.select, self.path) == (2, "topdelta", "fused"):
            return self.as_ffd().new_layer(geometry, rows, executor)
        require(geometry.head_dim % 8 == 0, "head_dim", geometry.head_dim, "a multiple of 8")
        return ComponentLayer(self, geometry, rows, executor)


class ComponentLayer(DenseLayer):
    """Dense storage and, below 16 bits, thumbnails of its complete blocks; ``delta_nats`` float32 [Hq]."""

    values_exact = True

    def __init__(self, method: Component, geometry: LayerGeometry, rows: RowState, executor: Executor) -> None:
        super().__init__(geometry, rows, executor)
        self.method = method
        self.thumbnails = None if method.bits == 16 else Thumbnails(geometry, method.bits, method.block_size)
        self.unit_budget = torch.full_like(rows.lengths, method.unit_budget)
        # On the device and per head, as FFD's: a captured graph serves other margins too.
        self.delta_nats = torch.full(
            (geometry.num_query_heads,), method.delta, dtype=torch.float32, device=geometry.device
        )

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Copy the prompts in and quantise their complete blocks."""
        super().prefill(keys, values)
        if self.thumbnails is not None:
            self.thumbnails.prefill(keys)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write one token per row; quantise the block before it where it opens one."""
        super().append(keys, values)
        if self.thumbnails is not None:
            self.thumbnails.append(self.keys, self.lengths, self.executor)

    @property
    def scanned(self) -> Tensor:
        """Tokens scored from the copy, int [B]; all where the keys themselves are scanned."""
        return self.lengths if self.thumbnails is None else scanned_tokens(self.lengths, self.method.block_size)

    def select(self, q: Tensor, scale: float) -> Selection:
        """Apply the rule of the module's docstring."""
        m, g, n = self.method, self.geometry, self.rows.longest
        exact = reference.key_scores(q, self.keys[:, :, :n], scale)
        scan = exact.clone()
        if self.thumbnails is not None:
            whole = (n - 1) // m.block_size * m.block_size
            quantised = reference.visible(self.scanned, whole)[:, None]
            scan[..., :whole] = torch.where(quantised, self.thumbnails.scores(q, scale, whole), exact[..., :whole])
        seen = reference.visible(self.lengths, n)[:, None]
        pseudo_max = None
        if m.select == "topk":
            units = pool_group(reference.unit_max(scan, seen, m.unit), g.num_kv_heads)
            kept = reference.share_with_group(top_k(units, self.unit_budget), g.num_query_heads)
        elif m.select == "topp":
            units = unit_logsumexp(scan, seen, m.unit)
            kept = at_least(units, top_p_threshold(units, m.p))
        else:
            pseudo_max = reference.pseudo_max(exact, self.lengths, m.n_sink, m.n_local)
            near = reference.near_tokens(self.lengths, n, m.n_sink, m.n_local)[:, None]
            tested = torch.where(near, torch.maximum(scan, exact), scan)
            kept = at_least(reference.unit_max(tested, seen, m.unit), pseudo_max - self.delta_nats)
        tail = ~reference.visible(scanned_tokens(self.lengths, m.block_size), n)[:, None]
        selected = (reference.expand_units(kept, m.unit, n) | tail) & seen
        return Selection(
            lengths=self.lengths,
            selected=selected,
            attended=reference.attend_union(selected, g.num_kv_heads),
            estimate=scan.masked_fill(~seen, torch.nan),
            scores=exact,
            scanned=self.scanned,
            pseudo_max=pseudo_max,
            margin=None if pseudo_max is None else self.delta_nats,
        )

    def bytes_read(self, counts: Counts) -> dict[str, Tensor]:
        """The scan of every token, and keys and values of the kept ones; not the few keys near both ends."""
        m, d = self.method, self.geometry.head_dim
        row = d * self.keys.element_size()
        half_steps = 0.0 if self.thumbnails is None else d * SCALE_DTYPE.itemsize / m.block_size
        return {
            "scan": counts.scanned * (row if self.thumbnails is None else d * m.bits / 8 + half_steps),
            "tail_keys": (counts.context - counts.scanned) * row,
            "keys": counts.union * row,
            "values": counts.union * row,
        }

    def _decode_fused(self, q: Tensor, scale: float) -> Tensor:
        from ffd.kernels.component import component_decode

        return component_decode(self, q, scale)
