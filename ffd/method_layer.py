"""Storage and decode of one attention layer under a method: what every method implements.

The storage is written by `prefill` and `append`, and read by `decode`, which runs the fused kernel or, under
``executor="reference"``, attends to exactly what `select` returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ffd import reference
from ffd.ledger import Counts, Ledger

Executor = Literal["fused", "reference"]
_OF_VALUES = frozenset({"values_exact", "stored_values", "prefill", "append", "step"})
"""Where a class has one of these, what its bases say of values does not hold for it."""


@dataclass(frozen=True)
class LayerGeometry:
    """Shape of one attention layer and of the rows it serves."""

    batch_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int
    """Tokens a row can hold."""
    dtype: torch.dtype
    device: torch.device
    layer: int = 0
    """The model's layer, for knobs that have a value per layer."""

    @property
    def group_size(self) -> int:
        """Query heads that share one kv head."""
        return self.num_query_heads // self.num_kv_heads


@dataclass
class RowState:
    """What all layers of a cache share about its rows; lives on the device, so that a graph reads it there."""

    lengths: Tensor
    """int32 [B]: tokens stored, the one being decoded included."""
    active: Tensor
    """int32 [B]: 1 while the row decodes, 0 once it has finished."""
    counted: int | None = None
    """Largest of `lengths` as counted on the host, None where nobody counts: set it where lengths are set."""

    @classmethod
    def allocate(cls, batch_size: int, device: torch.device | str) -> RowState:
        """Rows of length 0, all active."""
        return cls(
            lengths=torch.zeros(batch_size, dtype=torch.int32, device=device),
            active=torch.ones(batch_size, dtype=torch.int32, device=device),
        )

    def begin(self, lengths: Sequence[int]) -> None:
        """Rows of these lengths, all active."""
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.active.fill_(1)
        self.counted = max(lengths)

    def add_token(self) -> None:
        """One more token in every row."""
        self.lengths.add_(1)
        self.note_token()

    def note_token(self) -> None:
        """Count a token that a captured graph added: replay executes no Python, so the host's count is ours."""
        if self.counted is not None:
            self.counted += 1

    @property
    def longest(self) -> int:
        """Largest of `lengths`; waits for the device where nobody counts."""
        return int(self.lengths.max()) if self.counted is None else self.counted


@dataclass(frozen=True)
class Selection:
    """What one decode step attends to, from the reference executor; token axis N = longest row."""

    lengths: Tensor
    """int32 [B]."""
    selected: Tensor
    """bool [B, Hq, N]: tokens each query head's own rule keeps."""
    attended: Tensor
    """bool [B, Hq, N]: tokens the head's softmax runs over (for a union rule, its group's union)."""
    estimate: Tensor
    """float32 [B, Hq, N]: the selector's scores, natural units; NaN where it made none."""
    scores: Tensor
    """float32 [B, Hq, N]: the scores the softmax uses, natural units; NaN outside `attended` is allowed."""
    scanned: Tensor
    """int [B] or [B, Hkv]: tokens whose selection metadata were read."""
    pseudo_max: Tensor | None = None
    """float32 [B, Hq]: estimated row maximum, natural units, for the methods that have one."""
    estimated: Tensor | None = None
    """int, like `scanned`: tokens scored by a second estimate."""
    margin: Tensor | None = None
    """float32, broadcastable to [B, Hq]: nats below the row maximum that the rule keeps, where it has such a margin."""
    score_shift: Tensor | None = None
    """float32 [B, Hq]: what must be added to `scores`, `estimate` and `pseudo_max` to give scores of the keys as the
    model made them; None for zero. Softmax does not see it, a logsumexp does."""

    def union(self, num_kv_heads: int) -> Tensor:
        """Tokens loaded per kv head, bool [B, Hkv, N]."""
        return reference.union_over_group(self.attended, num_kv_heads)


class MethodLayer(ABC):
    """Storage and decode of one attention layer.

    Keys and values are ``[B, Hkv, T, d]``, post-RoPE, left-aligned: token ``i`` of a row sits in slot
    ``i`` whatever the row's padding was, so that a row behaves as if it ran alone.
    """

    values_exact: ClassVar[bool] = False
    """Whether `stored_values` gives the model's own values, which a probe then reads once. A class that stores or gives
    values in a way of its own says so anew."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        nearest = next(base for base in cls.__mro__ if not _OF_VALUES.isdisjoint(vars(base)))
        if "values_exact" not in vars(nearest):
            cls.values_exact = False

    def __init__(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> None:
        self.geometry = geometry
        self.rows = rows
        self.executor = executor
        g = geometry
        self.ledger = Ledger(g.batch_size, g.num_kv_heads, g.num_query_heads, g.device, rows.active)

    @property
    def lengths(self) -> Tensor:
        """int32 [B] on the device: tokens stored, the one being decoded included."""
        return self.rows.lengths

    @abstractmethod
    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Store whole prompts.

        Parameters
        ----------
        keys, values
            [B, Hkv, T, d], left-aligned; slots at or beyond a row's length hold anything.
            ``rows.lengths`` already holds the prompt lengths.
        """

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor) -> None:
        """Store one token per row, [B, Hkv, 1, d], in slot ``lengths - 1`` (the lengths already count it)."""

    @abstractmethod
    def select(self, q: Tensor, scale: float) -> Selection:
        """What `decode` attends to for ``q`` [B, Hq, d], computed by the fp32 reference on the stored cache."""

    @abstractmethod
    def stored_values(self, num_tokens: int) -> Tensor:
        """Values of the first ``num_tokens`` slots as the softmax uses them, [B, Hkv, num_tokens, d]."""

    @abstractmethod
    def bytes_read(self, counts: Counts) -> dict[str, Tensor]:
        """Bytes moved for the counted steps, by stage; each [B, Hkv]. Linear in the counts."""

    @abstractmethod
    def _decode_fused(self, q: Tensor, scale: float) -> Tensor:
        """Launch the method's kernel: q [B, Hq, d] -> [B, Hq, d]; must add to `ledger`."""

    def decode(self, q: Tensor, scale: float) -> Tensor:
        """Attend with the current token's query.

        Parameters
        ----------
        q
            [B, Hq, d], post-RoPE, model dtype.
        scale
            Softmax scale.

        Returns
        -------
        Tensor
            [B, Hq, d] in the dtype of ``q``.
        """
        if self.executor == "fused":
            return self._decode_fused(q, scale)
        return self.decode_reference(q, scale)[0]

    def step(self, keys: Tensor, values: Tensor, q: Tensor, scale: float) -> Tensor:
        """`append` and then `decode`, as a model's decode step does; a method may do both in one launch.

        Parameters
        ----------
        keys, values
            [B, Hkv, 1, d].
        q, scale
            See `decode`.
        """
        self.append(keys, values)
        return self.decode(q, scale)

    def decode_reference(self, q: Tensor, scale: float) -> tuple[Tensor, Selection]:
        """Decode with the reference executor; returns the output and the selection it came from."""
        selection = self.select(q, scale)
        num_tokens = selection.attended.shape[-1]
        out, _ = reference.masked_attention(selection.scores, selection.attended, self.stored_values(num_tokens))
        self.ledger.record(
            selection.lengths,
            selection.selected,
            selection.union(self.geometry.num_kv_heads),
            selection.scanned[:, None] if selection.scanned.ndim == 1 else selection.scanned,
            selection.estimated,
        )
        return out.to(q.dtype), selection

    def dense_bytes(self, counts: Counts) -> Tensor:
        """Bytes that dense attention in the model's dtype would have read for the same steps, [B, Hkv]."""
        return counts.context * (2 * self.geometry.head_dim * self.geometry.dtype.itemsize)
