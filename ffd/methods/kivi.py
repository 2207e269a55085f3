"""KIVI: all keys and values in 2 or 4 bits, keys per channel and values per token.

Rule (arXiv:2402.02750, github.com/jy-yuan/KIVI), asymmetric min-max over groups of 32 values:

* Keys: a group is 32 consecutive tokens of one channel. The newest ones wait in a buffer in full
  precision; when it holds ``residual_length`` tokens they are used once more and then quantised together.
* Values: a group is 32 consecutive channels of one token. The last ``residual_length`` tokens before
  the current one stay in full precision, in a sliding window.

Nothing is dropped: keep ratios are 1, and bytes are what it saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ffd import reference
from ffd.ledger import Counts
from ffd.methods import Executor, LayerGeometry, Method, MethodLayer, RowState, Selection, require
from ffd.methods.dense import write_token
from ffd.minmax import BOUND_DTYPE, BOUND_VECTOR, dequantize_minmax, pack_planes, quantize_minmax, unpack_planes

WORD = torch.int16
"""Codes of a row are packed in words as wide as a tensor core's operands (`ffd.kernels.kivi_codes`)."""


@dataclass(frozen=True)
class Kivi(Method):
    """Low-bit keys and values."""

    name: ClassVar[str] = "kivi"
    reads_everything: ClassVar[bool] = True
    keep_all_knobs: ClassVar[dict[str, Any]] = {"residual_length": 1 << 20, "group_size": 16}
    small_knobs: ClassVar[dict[str, Any]] = {"residual_length": 32, "group_size": 16}

    bits: int = 2
    """Bits per value: 2 or 4."""
    group_size: int = 32
    """Values that share minimum and step: 16, 32, 64 or 128."""
    residual_length: int = 128
    """Newest tokens in full precision, a multiple of `group_size`."""

    def __post_init__(self) -> None:
        require(self.bits in (2, 4), "bits", self.bits, "2 or 4")
        require(self.group_size in (16, 32, 64, 128), "group_size", self.group_size, "16, 32, 64 or 128")
        require(
            isinstance(self.residual_length, int)
            and self.residual_length > 0
            and self.residual_length % self.group_size == 0,
            "residual_length",
            self.residual_length,
            f"a positive multiple of group_size={self.group_size}",
        )

    def new_layer(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> KiviLayer:
        """Allocate codes, bounds and the two residuals."""
        require(
            geometry.head_dim % self.group_size == 0,
            "group_size",
            self.group_size,
            f"a divisor of head_dim={geometry.head_dim}",
        )
        return KiviLayer(self, geometry, rows, executor)


class KiviLayer(MethodLayer):
    """Quantised keys and values of one layer with their full-precision residuals, head-major.

    With ``N`` tokens stored, the current one included, and R = ``residual_length``: keys
    ``0 .. (N - 1) // R * R`` are quantised and the rest sit in ``key_buffer`` at ``position % R``;
    values ``0 .. N - 1 - R`` are quantised and the rest sit in ``value_window`` at
    ``position % (R + 1)``. Both are functions of the length alone, however the tokens came.

    Bounds of keys are stored by group of tokens and channel, those of values by group of channels and token.

    Under the reference executor ``restored`` holds keys and values as attention uses them, float32
    [2, B, Hkv, capacity, d], kept up to date: to restore the whole cache at every step takes most of a step.
    """

    def __init__(self, method: Kivi, geometry: LayerGeometry, rows: RowState, executor: Executor) -> None:
        super().__init__(geometry, rows, executor)
        self.method = method
        g, m = geometry, method
        lead = (g.batch_size, g.num_kv_heads)
        # At least one group, so that no buffer is empty where the residual holds everything.
        key_tokens = max(g.capacity // m.residual_length * m.residual_length, m.group_size)
        # Whole vectors: bounds of values are read along the tokens.
        value_tokens = -(-max(g.capacity - m.residual_length, 1) // BOUND_VECTOR) * BOUND_VECTOR
        row_words = g.head_dim * m.bits // (8 * WORD.itemsize)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*lead, *shape, dtype=dtype, device=g.device)

        self.key_codes = zeros(key_tokens, row_words, dtype=WORD)
        self.key_minimum = zeros(key_tokens // m.group_size, g.head_dim, dtype=BOUND_DTYPE)
        self.key_step = zeros(key_tokens // m.group_size, g.head_dim, dtype=BOUND_DTYPE)
        self.key_buffer = zeros(min(m.residual_length, g.capacity), g.head_dim, dtype=g.dtype)
        self.value_codes = zeros(value_tokens, row_words, dtype=WORD)
        self.value_minimum = zeros(g.head_dim // m.group_size, value_tokens, dtype=BOUND_DTYPE)
        self.value_step = zeros(g.head_dim // m.group_size, value_tokens, dtype=BOUND_DTYPE)
        self.value_window = zeros(min(m.residual_length + 1, g.capacity), g.head_dim, dtype=g.dtype)
        both = (2, *lead, g.capacity, g.head_dim)
        self.restored = torch.zeros(both, dtype=torch.float32, device=g.device) if executor == "reference" else None

    def quantized_keys(self, lengths: Tensor) -> Tensor:
        """Quantised keys of rows that hold ``lengths`` tokens, int [B]."""
        return (lengths - 1) // self.method.residual_length * self.method.residual_length

    def quantized_values(self, lengths: Tensor) -> Tensor:
        """Quantised values of rows that hold ``lengths`` tokens, int [B]."""
        return (lengths - 1 - self.method.residual_length).clamp(min=0)

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Quantise all that is older than the residuals and keep the rest."""
        self._store_keys(slice(None), keys[:, :, : int(self.quantized_keys(self.lengths).max())], first=0)
        self._store_values(slice(None), values[:, :, : int(self.quantized_values(self.lengths).max())], first=0)
        residual = self.method.residual_length
        starts = zip(
            self.lengths.tolist(),
            self.quantized_keys(self.lengths).tolist(),
            self.quantized_values(self.lengths).tolist(),
            strict=True,
        )
        for row, (length, first_key, first_value) in enumerate(starts):
            self.key_buffer[row, :, : length - first_key] = keys[row, :, first_key:length]
            slots = torch.arange(first_value, length, device=values.device) % (residual + 1)
            self.value_window[row, :, slots] = values[row, :, first_value:length]
            # A kernel reads bounds by whole vectors: beyond a row's own they must be finite.
            self.value_minimum[row, :, :, first_value:] = 0.0
            self.value_step[row, :, :, first_value:] = 0.0
            if self.restored is not None:
                self.restored[0, row, :, first_key:length] = keys[row, :, first_key:length]
                self.restored[1, row, :, first_value:length] = values[row, :, first_value:length]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write one token per row; quantise a full buffer, and the value that leaves the window, first."""
        if self.executor == "fused":
            from ffd.kernels.kivi_append import kivi_append

            kivi_append(self, keys, values)
            return
        residual = self.method.residual_length
        for row, length in enumerate(self.lengths.tolist()):
            rows, position = slice(row, row + 1), length - 1
            if position and position % residual == 0:
                self._store_keys(rows, self.key_buffer[rows], first=position - residual)
            leaving = position - residual - 1
            if leaving >= 0:
                slot = leaving % (residual + 1)
                self._store_values(rows, self.value_window[rows, :, slot : slot + 1], first=leaving)
        write_token(self.key_buffer, keys, (self.lengths - 1) % residual + 1)
        write_token(self.value_window, values, (self.lengths - 1) % (residual + 1) + 1)
        if self.restored is not None:
            write_token(self.restored[0], keys, self.lengths)
            write_token(self.restored[1], values, self.lengths)

    def _store_keys(self, rows: slice, keys: Tensor, first: int) -> None:
        m, group = self.method, self.method.group_size
        if not keys.shape[2]:
            return
        quantized = quantize_minmax(keys.unflatten(2, (-1, group)), m.bits, dim=3)
        groups = slice(first // group, first // group + quantized.codes.shape[2])
        tokens = slice(first, first + keys.shape[2])
        self.key_codes[rows, :, tokens] = pack_planes(quantized.codes.flatten(2, 3), m.bits, WORD)
        self.key_minimum[rows, :, groups] = quantized.minimum[:, :, :, 0]
        self.key_step[rows, :, groups] = quantized.step[:, :, :, 0]
        if self.restored is not None:
            self.restored[0, rows, :, tokens] = quantized.restored.flatten(2, 3)

    def _store_values(self, rows: slice, values: Tensor, first: int) -> None:
        m = self.method
        if not values.shape[2]:
            return
        quantized = quantize_minmax(values.unflatten(-1, (-1, m.group_size)), m.bits, dim=-1)
        tokens = slice(first, first + values.shape[2])
        self.value_codes[rows, :, tokens] = pack_planes(quantized.codes.flatten(-2), m.bits, WORD)
        self.value_minimum[rows, :, :, tokens] = quantized.minimum[..., 0].transpose(-1, -2)
        self.value_step[rows, :, :, tokens] = quantized.step[..., 0].transpose(-1, -2)
        if self.restored is not None:
            self.restored[1, rows, :, tokens] = quantized.restored.flatten(-2)

    def stored_keys(self, num_tokens: int) -> Tensor:
        """Keys as the scores use them, float32 [B, Hkv, num_tokens, d]."""
        return self.restored_keys(num_tokens) if self.restored is None else self.restored[0, :, :, :num_tokens]

    def stored_values(self, num_tokens: int) -> Tensor:
        """Values as the softmax uses them, float32 [B, Hkv, num_tokens, d]."""
        return self.restored_values(num_tokens) if self.restored is None else self.restored[1, :, :, :num_tokens]

    def restored_keys(self, num_tokens: int) -> Tensor:
        """Keys from codes and buffer, float32 [B, Hkv, num_tokens, d]."""
        m, n = self.method, min(num_tokens, self.key_codes.shape[2])
        position = torch.arange(num_tokens, device=self.lengths.device)
        keys = self.key_buffer[:, :, position % m.residual_length].float()
        group = position[:n] // m.group_size
        codes = unpack_planes(self.key_codes[:, :, :n], m.bits)
        restored = dequantize_minmax(codes, self.key_minimum[:, :, group], self.key_step[:, :, group])
        quantized = reference.visible(self.quantized_keys(self.lengths), n)[:, None, :, None]
        keys[:, :, :n] = torch.where(quantized, restored, keys[:, :, :n])
        return keys

    def restored_values(self, num_tokens: int) -> Tensor:
        """Values from codes and window, float32 [B, Hkv, num_tokens, d]."""
        m, n = self.method, min(num_tokens, self.value_codes.shape[2])
        position = torch.arange(num_tokens, device=self.lengths.device)
        values = self.value_window[:, :, position % (m.residual_length + 1)].float()
        codes = unpack_planes(self.value_codes[:, :, :n], m.bits).unflatten(-1, (-1, m.group_size))
        minimum, step = (x[..., :n].transpose(-1, -2)[..., None] for x in (self.value_minimum, self.value_step))
        restored = dequantize_minmax(codes, minimum, step).flatten(-2)
        quantized = reference.visible(self.quantized_values(self.lengths), n)[:, None, :, None]
        values[:, :, :n] = torch.where(quantized, restored, values[:, :, :n])
        return values

    def select(self, q: Tensor, scale: float) -> Selection:
        """Everything; ``scanned`` and ``estimated`` count the quantised keys and values, for `bytes_read`."""
        n = self.rows.longest
        scores = reference.key_scores(q, self.stored_keys(n), scale)
        everything = reference.visible(self.lengths, n)[:, None].expand_as(scores)
        return Selection(
            lengths=self.lengths,
            selected=everything,
            attended=everything,
            estimate=torch.full_like(scores, torch.nan),
            scores=scores,
            scanned=self.quantized_keys(self.lengths),
            estimated=self.quantized_values(self.lengths)[:, None],
        )

    def bytes_read(self, counts: Counts) -> dict[str, Tensor]:
        """Codes and bounds of quantised tokens, full rows of the residuals."""
        g, m = self.geometry, self.method
        row = g.head_dim * g.dtype.itemsize
        quantized_row = g.head_dim * (m.bits / 8 + 2 * BOUND_DTYPE.itemsize / m.group_size)
        return {
            "quantized_keys": counts.scanned * quantized_row,
            "residual_keys": (counts.context - counts.scanned) * row,
            "quantized_values": counts.estimated * quantized_row,
            "residual_values": (counts.context - counts.estimated) * row,
        }

    def _decode_fused(self, q: Tensor, scale: float) -> Tensor:
        from ffd.kernels.kivi_decode import kivi_decode

        return kivi_decode(self, q, scale)
