"""Dense attention through the same engine: the baseline every sparse method is judged by."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ffd import reference
from ffd.ledger import Counts
from ffd.methods import Executor, LayerGeometry, Method, MethodLayer, RowState, Selection


@dataclass(frozen=True)
class Dense(Method):
    """Attend to every token, exactly."""

    name: ClassVar[str] = "dense"
    reads_everything: ClassVar[bool] = True

    @property
    def dense_layers(self) -> int:
        """All of them, by configuration."""
        return sys.maxsize

    def new_layer(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> DenseLayer:
        """Allocate 16-bit keys and values."""
        return DenseLayer(geometry, rows, executor)


class DenseLayer(MethodLayer):
    """Keys and values in the model's dtype, head-major [B, Hkv, capacity, d]."""

    values_exact = True

    def __init__(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> None:
        super().__init__(geometry, rows, executor)
        g = geometry
        shape = (g.batch_size, g.num_kv_heads, g.capacity, g.head_dim)
        self.keys = torch.zeros(shape, dtype=g.dtype, device=g.device)
        self.values = torch.zeros(shape, dtype=g.dtype, device=g.device)

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Copy the prompts in."""
        self.keys[:, :, : keys.shape[2]] = keys
        self.values[:, :, : values.shape[2]] = values

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write one token per row at its own slot."""
        if self.executor == "fused":
            from ffd.kernels.kv_append import kv_append

            kv_append(keys, values, self.keys, self.values, self.lengths)
            return
        write_token(self.keys, keys, self.lengths)
        write_token(self.values, values, self.lengths)

    def select(self, q: Tensor, scale: float) -> Selection:
        """Everything."""
        n = self.rows.longest
        scores = reference.key_scores(q, self.keys[:, :, :n], scale)
        everything = reference.visible(self.lengths, n)[:, None].expand_as(scores)
        return Selection(
            lengths=self.lengths,
            selected=everything,
            attended=everything,
            estimate=torch.full_like(scores, torch.nan),
            scores=scores,
            scanned=torch.zeros_like(self.lengths),
        )

    def stored_values(self, num_tokens: int) -> Tensor:
        """Values as stored."""
        return self.values[:, :, :num_tokens]

    def bytes_read(self, counts: Counts) -> dict[str, Tensor]:
        """Each visible key and value once."""
        row = self.geometry.head_dim * self.keys.element_size()
        return {"keys": counts.union * row, "values": counts.union * row}

    def _decode_fused(self, q: Tensor, scale: float) -> Tensor:
        from ffd.kernels.dense_decode import dense_decode

        return dense_decode(q, self.keys, self.values, self.lengths, scale, self.ledger)


def write_token(buffer: Tensor, token: Tensor, lengths: Tensor) -> None:
    """Write one token per row into slot ``lengths - 1``, with positions read on the device.

    Parameters
    ----------
    buffer
        [B, Hkv, capacity, d], written in place.
    token
        [B, Hkv, 1, d].
    lengths
        int32 [B], the token already counted.
    """
    row = torch.arange(buffer.shape[0], device=buffer.device)
    buffer[row, :, (lengths - 1).long()] = token[:, :, 0].to(buffer.dtype)
