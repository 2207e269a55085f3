"""What the exact-score rules share: score every key, reduce to units, keep by one rule, attend to the kept.

These methods bound what an approximate selector can reach at the same granularity; they read all
keys and save the values alone. A rule is a subclass of :class:`ExactScoreMethod` with two short
methods: `keep_units`, its definition, and `find_threshold`, the same on the GPU.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ffd import reference
from ffd.ledger import Counts
from ffd.methods import Executor, LayerGeometry, Method, RowState, Selection, require
from ffd.methods.dense import DenseLayer
from ffd.selection import GRANULARITIES, SELECT_PER, last_unit, pool_group, unit_logsumexp

if TYPE_CHECKING:
    from ffd.kernels.thresholds import Threshold
    from ffd.kernels.units import Scores


@dataclass(frozen=True)
class ExactScoreMethod(Method):
    """Knobs of every rule over exact scores.

    A unit's score is the largest of its tokens' scores (its softmax mass for ``topp``). Under
    ``select_per=group`` a budget rule ranks the largest score over the group's query heads and keeps
    one list per kv head; every other rule lets each head attend to the union of its group's sets.
    """

    exact_scores: ClassVar[bool] = True
    pools_group: ClassVar[bool] = False
    """True for budget rules: a union of budgets would exceed the budget."""
    weighs_mass: ClassVar[bool] = False
    """True where a unit's score is the log of its softmax mass instead of its largest score."""

    granularity: str = "token"
    """Unit kept or dropped as a whole: token, page (16 tokens), sub_block (32) or block (128)."""
    unit_size: int | None = None
    """Tokens per unit, if not the granularity's own: a power of two, 16 to 256."""
    select_per: str = "head"
    """``head``: each query head attends to its own set; ``group``: one set per kv head."""
    force_local: bool = False
    """Keep the current token's unit too, whatever its score."""

    def __post_init__(self) -> None:
        require(
            self.granularity in GRANULARITIES, "granularity", self.granularity, "one of " + ", ".join(GRANULARITIES)
        )
        require(
            self.unit_size is None or (self.granularity != "token" and self.unit_size in (16, 32, 64, 128, 256)),
            "unit_size",
            self.unit_size,
            "16, 32, 64, 128 or 256 (a power of two), with a granularity other than token",
        )
        require(self.select_per in SELECT_PER, "select_per", self.select_per, "head or group")
        require(isinstance(self.force_local, bool), "force_local", self.force_local, "true or false")

    @property
    def unit(self) -> int:
        """Tokens per unit."""
        return self.unit_size or GRANULARITIES[self.granularity]

    @property
    def margin(self) -> float | None:
        """Nats below `pseudo_max` that the rule keeps, for the rules that have such a margin."""
        return None

    def pseudo_max(self, units: Tensor, scores: Tensor) -> Tensor | None:
        """What the margin is measured from, float32 [B, Hq]; arguments as for `keep_units`."""
        return None

    @property
    def shares_list(self) -> bool:
        """Whether the group's heads are ranked together."""
        return self.pools_group and self.select_per == "group"

    @abstractmethod
    def keep_units(self, units: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
        """Apply the rule.

        Parameters
        ----------
        units
            float32 [B, R, U]; R is the number of query heads, or of kv heads where a group shares a list.
        scores
            float32 [B, Hq, N], the tokens' own.
        lengths
            int [B].

        Returns
        -------
        Tensor
            bool [B, R, U].
        """

    @abstractmethod
    def find_threshold(self, exact: Scores, lengths: Tensor) -> Threshold:
        """Apply the rule on the device, by the kernels in ``ffd/kernels/thresholds.py``."""

    def new_layer(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> ExactScoreLayer:
        """Allocate 16-bit keys and values."""
        return ExactScoreLayer(self, geometry, rows, executor)


class ExactScoreLayer(DenseLayer):
    """Dense storage whose decode step attends to what an exact-score rule keeps."""

    def __init__(self, method: ExactScoreMethod, geometry: LayerGeometry, rows: RowState, executor: Executor) -> None:
        super().__init__(geometry, rows, executor)
        self.method = method

    def select(self, q: Tensor, scale: float) -> Selection:
        """Apply the method's rule to the exact scores."""
        m, g, n = self.method, self.geometry, self.rows.longest
        scores = reference.key_scores(q, self.keys[:, :, :n], scale)
        seen = reference.visible(self.lengths, n)[:, None]
        reduce = unit_logsumexp if m.weighs_mass else reference.unit_max
        units = reduce(scores, seen, m.unit)
        if m.shares_list:
            units = pool_group(units, g.num_kv_heads)
        kept = m.keep_units(units, scores, self.lengths)
        if m.force_local:
            kept = kept | last_unit(self.lengths, m.unit, units.shape[-1])
        if m.shares_list:
            kept = reference.share_with_group(kept, g.num_query_heads)
        selected = reference.expand_units(kept, m.unit, n) & seen
        attended = reference.attend_union(selected, g.num_kv_heads) if m.select_per == "group" else selected
        return Selection(
            lengths=self.lengths,
            selected=selected,
            attended=attended,
            estimate=scores.masked_fill(~seen, torch.nan),
            scores=scores,
            scanned=self.lengths,
            pseudo_max=m.pseudo_max(units, scores),
            margin=None if m.margin is None else scores.new_tensor(m.margin),
        )

    def bytes_read(self, counts: Counts) -> dict[str, Tensor]:
        """Every key to score it, and the values of what was kept."""
        row = self.geometry.head_dim * self.keys.element_size()
        return {"keys": counts.scanned * row, "values": counts.union * row}

    def _decode_fused(self, q: Tensor, scale: float) -> Tensor:
        from ffd.kernels.exact_scores import exact_score_decode

        return exact_score_decode(self, q, scale)
