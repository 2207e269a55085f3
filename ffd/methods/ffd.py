"""FFD: scan a 2-bit copy of the keys, keep the blocks within delta of a pseudo-maximum, attend to those.

Rule ("Faster Than Flash", arXiv:2609.00097, section 3), per kv head with G query heads:

1. Keys of complete blocks are stored as 2-bit thumbnails with one half step per block and channel,
   plus a residual; the incomplete last block, the tail, stays in the model's dtype.
2. Every query head scores all thumbnails; its pseudo-maximum is the largest score among the first
   ``n_sink`` and the last ``n_local`` tokens: refined by the residual, the tail's exact.
3. A sub-block passes for a head if its largest score is at least ``pseudo_max - delta``; it is kept if
   it passes for any head of the group. The current token is always kept: with the whole tail or, in the
   step that completes a block, with its sub-block (a head's thumbnails may all miss the threshold).
4. Kept scores are the scan's plus the residual's: nothing is scored twice.

Published settings are the defaults. What the official code does otherwise is behind switches
(``residual=e4m3``, ``delta_unit=log2``, ``pseudo_max=scan``) or documented in ``docs/methods/ffd.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ffd import reference
from ffd.ledger import Counts
from ffd.methods.base import Executor, LayerGeometry, Method, MethodLayer, RowState, SearchKnob, Selection, require
from ffd.methods.dense import write_token
from ffd.quantization import (
    CODES_PER_BYTE,
    LEVELS,
    RESIDUALS,
    SCALE_DTYPE,
    Levels,
    Residual,
    odd_levels,
    quantize_blocks,
    residual_dtype,
    residual_in_half_steps,
)

LOG2_E = math.log2(math.e)


def as_margins(value: Any) -> tuple[tuple[float, ...], ...]:
    """Check margins per layer and head, and make them hashable; raises `KnobError`."""
    accepted = "one row of numbers >= 0 per layer, one number per query head"
    require(isinstance(value, (list, tuple)) and len(value) > 0, "deltas", value, accepted)
    for row in value:
        require(isinstance(row, (list, tuple)) and len(row) > 0, "deltas", row, accepted)
        for delta in row:
            number = isinstance(delta, (int, float)) and not isinstance(delta, bool)
            require(number and delta >= 0, "deltas", delta, accepted)
    return tuple(tuple(float(delta) for delta in row) for row in value)


@dataclass(frozen=True)
class FFD(Method):
    """Top-delta over 2-bit thumbnails."""

    name: ClassVar[str] = "ffd"
    search_knob: ClassVar[SearchKnob] = SearchKnob("delta", 0.0, 32.0)
    keep_all_knobs: ClassVar[dict[str, Any]] = {"delta": math.inf, "residual": "exact"}
    small_knobs: ClassVar[dict[str, Any]] = {"block_size": 64, "sub_block": 16, "delta": 0.25, "n_sink": 4}

    delta: float = 7.0
    """Margin below the pseudo-maximum, in `delta_unit`; infinity keeps everything."""
    deltas: tuple[tuple[float, ...], ...] | None = None
    """Calibrated margins in place of `delta`: one row per model layer, one number per query head."""
    delta_unit: str = "nat"
    """``nat`` (the paper's text) or ``log2`` (what the official code computes: delta * ln 2 nats)."""
    block_size: int = 128
    """Tokens that share one half step per channel: 64, 128 or 256."""
    sub_block: int | None = None
    """Tokens tested and loaded together; None means `block_size`, as published."""
    residual: Residual = "int8"
    """Refinement of kept keys: int8, e4m3 (official), none, or exact (tests)."""
    levels: Levels = "edge"
    """Placement of the four levels: edge (published) or cell."""
    centre: bool = False
    """Subtract the prompt's mean key per (kv head, channel), which softmax does not see."""
    pseudo_max: str = "refined"
    """Scores behind the pseudo-maximum: refined (never above the row's maximum but for rounding, which the
    paper's fail-safe argument needs), or scan (official: an attention sink's small key is all quantisation
    noise, the pseudo-maximum comes out many nats too high and blocks that matter are dropped)."""
    n_sink: int = 128
    """First tokens in the pseudo-maximum."""
    n_local: int = 128
    """Last tokens in the pseudo-maximum, the tail included."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.delta, (int, float)) and not isinstance(self.delta, bool) and self.delta >= 0,
            "delta",
            self.delta,
            "a number >= 0",
        )
        if self.deltas is not None:
            object.__setattr__(self, "deltas", as_margins(self.deltas))
        require(self.delta_unit in ("nat", "log2"), "delta_unit", self.delta_unit, "nat or log2")
        require(
            isinstance(self.block_size, int) and self.block_size in (64, 128, 256),
            "block_size",
            self.block_size,
            "64, 128 or 256 (a power of two)",
        )
        require(
            self.sub_block is None
            or (
                isinstance(self.sub_block, int)
                and self.sub_block in (16, 32, 64, 128, 256)
                and self.sub_block <= self.block_size
            ),
            "sub_block",
            self.sub_block,
            f"16, 32, 64, 128 or 256 (a power of two), at most block_size={self.block_size}",
        )
        require(self.residual in RESIDUALS, "residual", self.residual, "one of " + ", ".join(RESIDUALS))
        require(self.levels in LEVELS, "levels", self.levels, "one of " + ", ".join(LEVELS))
        require(isinstance(self.centre, bool), "centre", self.centre, "true or false")
        require(self.pseudo_max in ("refined", "scan"), "pseudo_max", self.pseudo_max, "refined or scan")
        require(type(self.n_sink) is int and 0 <= self.n_sink < 2**31, "n_sink", self.n_sink, "an integer >= 0")
        require(type(self.n_local) is int and 1 <= self.n_local < 2**31, "n_local", self.n_local, "an integer >= 1")

    @property
    def nats(self) -> float:
        """Natural-log units per unit of a margin."""
        return 1.0 / LOG2_E if self.delta_unit == "log2" else 1.0

    @property
    def delta_nats(self) -> float:
        """Margin in natural-log units."""
        return self.delta * self.nats

    def margins(self, layer: int, num_query_heads: int) -> tuple[float, ...]:
        """Margin of each query head of a layer, in natural-log units.

        Raises
        ------
        KnobError
            If `deltas` has no row for the layer, or not one number per head.
        """
        if self.deltas is None:
            return (self.delta_nats,) * num_query_heads
        require(
            layer < len(self.deltas), "deltas", f"{len(self.deltas)} rows", f"one for each layer, layer {layer} too"
        )
        row = self.deltas[layer]
        require(
            len(row) == num_query_heads,
            "deltas",
            f"{len(row)} numbers for layer {layer}",
            f"one for each of {num_query_heads} query heads",
        )
        return tuple(delta * self.nats for delta in row)

    @property
    def test_size(self) -> int:
        """Tokens per keep test."""
        return self.sub_block or self.block_size

    def new_layer(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> FFDLayer:
        """Allocate thumbnails, residual, values and tail."""
        require(geometry.head_dim % 8 == 0, "head_dim", geometry.head_dim, "a multiple of 8")
        return FFDLayer(self, geometry, rows, executor)


class FFDLayer(MethodLayer):
    """2-bit keys, residual, values and a full-precision tail of one layer, head-major.

    Buffers (``C`` = capacity rounded up to whole blocks): ``codes`` uint8 [B, Hkv, C, d/4],
    ``half_step`` float16 [B, Hkv, C/block_size, d], ``residual`` [B, Hkv, C, d] or None,
    ``values`` [B, Hkv, C, d], ``tail`` [B, Hkv, block_size, d], ``centre`` float32 [B, Hkv, d] or None,
    ``delta_nats`` float32 [Hq].
    Tokens ``0 .. lengths // block_size * block_size`` are quantised, the rest are in the tail at
    ``position % block_size``: a function of the length alone, however the tokens came.
    """

    def __init__(self, method: FFD, geometry: LayerGeometry, rows: RowState, executor: Executor) -> None:
        super().__init__(geometry, rows, executor)
        self.method = method
        g, block = geometry, method.block_size
        num_blocks = -(-g.capacity // block)
        lead = (g.batch_size, g.num_kv_heads)
        tokens = num_blocks * block

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*lead, *shape, dtype=dtype, device=g.device)

        self.codes = zeros(tokens, g.head_dim // CODES_PER_BYTE, dtype=torch.uint8)
        self.half_step = zeros(num_blocks, g.head_dim, dtype=SCALE_DTYPE)
        stored = residual_dtype(method.residual, g.dtype)
        self.residual = None if stored is None else zeros(tokens, g.head_dim, dtype=stored)
        self.values = zeros(tokens, g.head_dim, dtype=g.dtype)
        self.tail = zeros(block, g.head_dim, dtype=g.dtype)
        self.centre = zeros(g.head_dim, dtype=torch.float32) if method.centre else None
        # On the device and per head, so that a captured graph serves calibrated margins too.
        margins = method.margins(g.layer, g.num_query_heads)
        self.delta_nats = torch.tensor(margins, dtype=torch.float32, device=g.device)

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Quantise the complete blocks of each prompt at once and keep the rest as its tail."""
        block = self.method.block_size
        self.values[:, :, : values.shape[2]] = values
        if self.centre is not None:
            real = reference.visible(self.lengths, keys.shape[2])[:, None, :, None]
            total = keys.float().masked_fill(~real, 0.0).sum(dim=2)
            self.centre.copy_(total / self.lengths[:, None, None])
            keys = (keys.float() - self.centre[:, :, None]).to(keys.dtype)
        whole = keys.shape[2] // block * block
        if whole:
            self._store_blocks(slice(None), keys[:, :, :whole], first_block=0)
        for row, length in enumerate(self.lengths.tolist()):
            tail = keys[row, :, length // block * block : length]
            self.tail[row, :, : tail.shape[1]] = tail

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write one token per row; quantise a block in the step that fills it."""
        if self.executor == "fused":
            from ffd.kernels.ffd_append import ffd_append

            ffd_append(self, keys, values)
            return
        block = self.method.block_size
        if self.centre is not None:
            keys = (keys.float() - self.centre[:, :, None]).to(keys.dtype)
        write_token(self.values, values, self.lengths)
        write_token(self.tail, keys, (self.lengths - 1) % block + 1)
        for row, length in enumerate(self.lengths.tolist()):
            if length % block == 0:
                self._store_blocks(slice(row, row + 1), self.tail[row : row + 1], length // block - 1)

    def _store_blocks(self, rows: slice, keys: Tensor, first_block: int) -> None:
        block = self.method.block_size
        q = quantize_blocks(keys.unflatten(2, (-1, block)), self.method.levels, self.method.residual)
        blocks = slice(first_block, first_block + q.codes.shape[2])
        tokens = slice(blocks.start * block, blocks.stop * block)
        self.codes[rows, :, tokens] = q.codes.flatten(2, 3)
        self.half_step[rows, :, blocks] = q.half_step
        if self.residual is not None and q.residual is not None:
            self.residual[rows, :, tokens] = q.residual.flatten(2, 3)

    def select(self, q: Tensor, scale: float) -> Selection:
        """Apply the rule of the module's docstring to the stored cache."""
        m, n = self.method, int(self.lengths.max())
        quantised = self.lengths // m.block_size * m.block_size
        scan, refinement = self._scores(q, scale, n)
        seen = reference.visible(self.lengths, n)[:, None]
        thumbnails = reference.visible(quantised, n)[:, None]
        near = scan + refinement if m.pseudo_max == "refined" else scan
        floor = reference.pseudo_max(near, self.lengths, m.n_sink, m.n_local)
        passed = reference.unit_max(scan, thumbnails, m.test_size) >= (floor - self.delta_nats)[..., None]
        units = torch.arange(passed.shape[-1], device=q.device)
        current = (units == (self.lengths[:, None] - 1) // m.test_size) & (quantised == self.lengths)[:, None]
        passed |= current[:, None]
        tail = seen & ~thumbnails
        selected = reference.expand_units(passed, m.test_size, n) & thumbnails | tail
        return Selection(
            lengths=self.lengths,
            selected=selected,
            attended=reference.attend_union(selected, self.geometry.num_kv_heads),
            estimate=scan.masked_fill(~seen, torch.nan),
            scores=scan + refinement,
            scanned=quantised,
            pseudo_max=floor,
            margin=self.delta_nats,
            score_shift=None
            if self.centre is None
            else reference.key_scores(q, self.centre[:, :, None], scale).squeeze(-1),
        )

    def _scores(self, q: Tensor, scale: float, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Scan scores and what the residual adds, both float32 [B, Hq, N] in natural units.

        The query and its product with the half steps are rounded to fp16 as in the kernel, so that both
        executors test the same numbers; thumbnails are small odd integers and exact in any format.
        """
        m, hkv = self.method, self.geometry.num_kv_heads
        block = m.block_size
        num_blocks = num_tokens // block
        whole = num_blocks * block
        query = (reference.group_heads(q.float(), hkv) * (scale * LOG2_E)).to(SCALE_DTYPE).float()
        h = self.half_step[:, :, :num_blocks].float()
        operand = (query[:, :, None] * h[:, :, :, None]).to(SCALE_DTYPE).float()  # [B, Hkv, blocks, G, d]

        def dot(tokens: Tensor) -> Tensor:
            scores = operand @ tokens.unflatten(2, (num_blocks, block)).transpose(-1, -2)
            return scores.permute(0, 1, 3, 2, 4).flatten(3, 4).flatten(1, 2) / LOG2_E

        # Slots of the row's tail: exact scores at their position.
        position = torch.arange(num_tokens, device=q.device)
        tail = reference.key_scores(q, self.tail, scale)[..., position % block]
        scan = tail.clone()
        refinement = torch.zeros_like(tail)
        if whole:
            thumbnails = dot(odd_levels(self.codes[:, :, :whole]))
            quantised = reference.visible(self.lengths // block * block, whole)[:, None]
            scan[..., :whole] = torch.where(quantised, thumbnails, tail[..., :whole])
            if self.residual is not None:
                stored = self.residual[:, :, :whole]
                if m.residual == "exact":
                    added = reference.key_scores(q, stored, scale) - thumbnails
                else:
                    shaped = residual_in_half_steps(
                        stored.unflatten(2, (num_blocks, block)), self.half_step[:, :, :num_blocks]
                    )
                    added = dot(shaped.flatten(2, 3))
                refinement[..., :whole] = torch.where(quantised, added, 0.0)
        return scan, refinement

    def stored_values(self, num_tokens: int) -> Tensor:
        """Values as stored."""
        return self.values[:, :, :num_tokens]

    def bytes_read(self, counts: Counts) -> dict[str, Tensor]:
        """Thumbnails and half steps of all blocks; residual and values of kept ones; the tail's keys."""
        g, m = self.geometry, self.method
        tail = counts.context - counts.scanned
        stored = residual_dtype(m.residual, g.dtype)
        residual_bytes = 0 if stored is None else stored.itemsize
        return {
            "thumbnails": counts.scanned * (g.head_dim / CODES_PER_BYTE),
            "half_steps": counts.scanned * (g.head_dim * SCALE_DTYPE.itemsize / m.block_size),
            "residual": (counts.union - tail) * (g.head_dim * residual_bytes),
            "tail_keys": tail * (g.head_dim * g.dtype.itemsize),
            "values": counts.union * (g.head_dim * g.dtype.itemsize),
        }

    def _decode_fused(self, q: Tensor, scale: float) -> Tensor:
        from ffd.kernels.ffd_decode import ffd_decode

        return ffd_decode(self, q, scale)
