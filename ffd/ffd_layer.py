"""Storage of the FFD method: 2-bit thumbnails, residuals, values and a full-precision tail of one layer.

The rule itself is in `ffd.methods.ffd`; this file holds the buffers, the fp32 reference of what is scored and
kept, and what a step reads. The fused executor's kernels work on the same buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ffd import reference
from ffd.ledger import Counts
from ffd.methods import Executor, LayerGeometry, MethodLayer, RowState, Selection
from ffd.methods.dense import write_token
from ffd.quantization import (
    CODES_PER_BYTE,
    INT8_RESIDUAL_STEP,
    SCALE_DTYPE,
    odd_levels,
    quantize_blocks,
    residual_dtype,
)
from ffd.scan import operand_scores, scan_operand, scanned_tokens

if TYPE_CHECKING:
    from ffd.methods.ffd import FFD


class FFDLayer(MethodLayer):
    """2-bit keys, residual, values and a full-precision tail of one layer, head-major.

    Buffers (``C`` = capacity rounded up to whole blocks): ``codes`` uint8 [B, Hkv, C, d/4],
    ``half_step`` float16 [B, Hkv, C/block_size, d], ``residual`` [B, Hkv, C, d] or None,
    ``values`` [B, Hkv, C, d], ``tail`` [B, Hkv, block_size, d], ``centre`` float32 [B, Hkv, d] or None,
    ``delta_nats`` float32 [Hq].
    A block is quantised in the step that fills it and used so from the next step on: the first
    ``(lengths - 1) // block_size * block_size`` tokens are scanned, the rest are in the tail at
    ``position % block_size``. A function of the length alone, however the tokens came.
    """

    values_exact = True

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
            tail = keys[row, :, (length - 1) // block * block : length]
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
        m, n = self.method, self.rows.longest
        quantised = scanned_tokens(self.lengths, m.block_size)
        scan, refinement = self._scores(q, scale, n)
        seen = reference.visible(self.lengths, n)[:, None]
        thumbnails = reference.visible(quantised, n)[:, None]
        refined = m.pseudo_max == "refined"
        floor = reference.pseudo_max(scan + refinement if refined else scan, self.lengths, m.n_sink, m.n_local)
        threshold = (floor - self.delta_nats)[..., None]
        passed = reference.unit_max(scan, thumbnails, m.test_size) >= threshold
        if refined:
            near = reference.near_tokens(self.lengths, n, m.n_sink, m.n_local)[:, None] & thumbnails
            passed |= reference.unit_max(scan + refinement, near, m.test_size) >= threshold
        tail = seen & ~thumbnails
        selected = reference.expand_units(passed, m.test_size, n) & thumbnails | tail
        return Selection(
            lengths=self.lengths,
            selected=selected,
            attended=selected
            if m.select_per == "head"
            else reference.attend_union(selected, self.geometry.num_kv_heads),
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

        Thumbnails are small odd integers, exact in any format. An int8 residual counts in half steps too and is
        multiplied with the same operand; an e4m3 residual is a part of the key, multiplied with the query itself.
        """
        m = self.method
        block = m.block_size
        num_blocks = num_tokens // block
        whole = num_blocks * block
        operand = scan_operand(q, self.half_step[:, :, :num_blocks], scale)
        # Slots of the row's tail: exact scores at their position.
        position = torch.arange(num_tokens, device=q.device)
        tail = reference.key_scores(q, self.tail, scale)[..., position % block]
        scan = tail.clone()
        refinement = torch.zeros_like(tail)
        if whole:
            thumbnails = operand_scores(operand, odd_levels(self.codes[:, :, :whole]), block)
            quantised = reference.visible(scanned_tokens(self.lengths, block), whole)[:, None]
            scan[..., :whole] = torch.where(quantised, thumbnails, tail[..., :whole])
            if self.residual is not None:
                stored = self.residual[:, :, :whole]
                if m.residual == "int8":
                    added = operand_scores(operand, stored.float(), block) * INT8_RESIDUAL_STEP
                else:
                    added = reference.key_scores(q, stored, scale) - (thumbnails if m.residual == "exact" else 0.0)
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

    def step(self, keys: Tensor, values: Tensor, q: Tensor, scale: float) -> Tensor:
        """Append and decode; the fused executor stores the token in the launch that scans."""
        if self.executor != "fused":
            return super().step(keys, values, q, scale)
        from ffd.kernels.ffd_decode import ffd_decode

        return ffd_decode(self, q, scale, token=(keys, values))

    def _decode_fused(self, q: Tensor, scale: float) -> Tensor:
        from ffd.kernels.ffd_decode import ffd_decode

        return ffd_decode(self, q, scale)
