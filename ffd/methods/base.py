"""The contract between a decode method and everything else: engine, cache, runners, tests.

A method is a frozen dataclass of knobs (:class:`Method`) that makes one storage per model layer
(:class:`MethodLayer`). The storage is written by `prefill` and `append`, and read by `decode`, which
runs the fused kernel or, under ``executor="reference"``, attends to exactly what `select` returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ffd import reference
from ffd.knob_types import wrong_kind
from ffd.ledger import Counts, Ledger

Executor = Literal["fused", "reference"]


class KnobError(ValueError):
    """A knob has a value the method does not accept; the message names knob, value and what is accepted."""


def require(condition: bool, knob: str, value: object, accepted: str) -> None:
    """Raise `KnobError` unless ``condition`` holds."""
    if not condition:
        raise KnobError(f"{knob}={value}: expected {accepted}")


@dataclass(frozen=True)
class SearchKnob:
    """The knob along which a method reads more and loses less: what calibration and matching search."""

    name: str
    low: float
    """Least value worth trying; an int makes the knob one."""
    high: float
    """Largest value worth trying; infinity for the context's length."""


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


@dataclass(frozen=True)
class RowState:
    """What all layers of a cache share about its rows; lives on the device, so that a graph reads it there."""

    lengths: Tensor
    """int32 [B]: tokens stored, the one being decoded included."""
    active: Tensor
    """int32 [B]: 1 while the row decodes, 0 once it has finished."""

    @classmethod
    def allocate(cls, batch_size: int, device: torch.device | str) -> RowState:
        """Rows of length 0, all active."""
        return cls(
            lengths=torch.zeros(batch_size, dtype=torch.int32, device=device),
            active=torch.ones(batch_size, dtype=torch.int32, device=device),
        )


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


@dataclass(frozen=True)
class Method(ABC):
    """Name and knobs of a decode method.

    Subclasses are frozen dataclasses whose fields are the knobs, each followed by a one-line
    docstring, validated in ``__post_init__`` by `require`. A module in ``ffd/methods`` that defines
    one is found by its class attribute ``name``.
    """

    name: ClassVar[str]
    reads_everything: ClassVar[bool] = False
    """True for methods without selection (dense, kivi): keep ratios are 1 by construction."""
    exact_scores: ClassVar[bool] = False
    """True for oracles: whatever their rule keeps are the tokens (units) of largest exact score."""
    search_knob: ClassVar[SearchKnob | None] = None
    """The knob that recall and bytes read never fall with, where there is one."""
    keep_all_knobs: ClassVar[Mapping[str, Any]] = {}
    """Knobs under which the method attends to everything exactly, so that it must equal dense."""
    small_knobs: ClassVar[Mapping[str, Any]] = {}
    """Knobs under which contexts of a few dozen tokens exercise the rule: conformance tests run with them."""

    @abstractmethod
    def new_layer(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> MethodLayer:
        """Allocate the storage of one layer; raises `KnobError` if the knobs do not fit the geometry."""

    @property
    def label(self) -> str:
        """Name in a table: `name`, and what makes two configurations two methods."""
        return self.name

    @property
    def cost_knob(self) -> SearchKnob | None:
        """`search_knob`, unless another knob decides which one it is."""
        return self.search_knob

    @property
    def margins_per_head(self) -> bool:
        """Whether its layers read a margin for each query head from ``delta_nats``, a float32 tensor [Hq]."""
        return "deltas" in self.knobs()

    @property
    def dense_layers(self) -> int:
        """Leading layers this method leaves dense (``skip_layers`` where it has that knob)."""
        return getattr(self, "skip_layers", 0)

    def knobs(self) -> dict[str, Any]:
        """Knob names and values, in declaration order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_knobs(cls, knobs: Mapping[str, Any]) -> Method:
        """Build from a mapping; raises `KnobError` for a knob that the method does not have, or a wrong value."""
        known = {field.name: field.type for field in fields(cls)}
        for knob, value in knobs.items():
            require(knob in known, knob, value, f"a knob of method {cls.name} ({', '.join(sorted(known))})")
        # The method's own check first: it knows more of what is accepted.
        with suppress(TypeError):
            cls(**knobs)
        for knob, value in knobs.items():
            accepted = wrong_kind(known[knob], value)
            require(accepted is None, knob, value, str(accepted))
        return cls(**knobs)
