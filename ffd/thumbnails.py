"""Low-bit thumbnails of 16-bit keys: FFD's 2-bit quantiser at other widths, kept beside the keys for a scan.

``b`` bits code the odd multiples ``2u - (2**b - 1)`` of a half step, one per block and channel: the block's
amplitude over ``2**b - 1``. For two bits these are the published levels (``edge`` in `ffd.quantization`), value
for value. A block is quantised by the step after the one that fills it, so that the tail, all tokens after the
last quantised block, always holds the current one; its keys are scored as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ffd.methods import Executor, LayerGeometry
from ffd.minmax import pack_planes, unpack_planes
from ffd.quantization import SCALE_DTYPE
from ffd.scan import operand_scores, scan_operand


def quantize_thumbnails(keys: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise whole blocks.

    Parameters
    ----------
    keys
        Floating [..., block_size, d].
    bits
        2, 4 or 8.

    Returns
    -------
    codes : Tensor
        uint8 [..., block_size, d * bits / 8], packed by `ffd.minmax.pack_planes`.
    half_step : Tensor
        float16 [..., d].
    """
    k = keys.float()
    half_step = (k.abs().amax(dim=-2) * (1.0 / (2**bits - 1))).to(SCALE_DTYPE)
    h = half_step.float().unsqueeze(-2)
    steps = k / (2.0 * torch.where(h > 0, h, torch.ones_like(h)))
    # The nearest level: ties go towards zero and zero goes up, as in `ffd.quantization.quantize_blocks`.
    codes = (steps.ceil() + (steps == 0) + (2 ** (bits - 1) - 1)).clamp(0, 2**bits - 1)
    return pack_planes(codes.to(torch.uint8), bits), half_step


class Thumbnails:
    """``codes`` uint8 [B, Hkv, blocks * block_size, d * bits / 8] and ``half_step`` float16 [B, Hkv, blocks, d]."""

    def __init__(self, geometry: LayerGeometry, bits: int, block_size: int) -> None:
        g = geometry
        self.bits = bits
        self.block_size = block_size
        lead = (g.batch_size, g.num_kv_heads, max(1, g.capacity // block_size))
        row_bytes = g.head_dim * bits // 8
        codes = torch.zeros(*lead, block_size, row_bytes, dtype=torch.uint8, device=g.device)
        self.codes = codes.flatten(2, 3)
        self.half_step = torch.zeros(*lead, g.head_dim, dtype=SCALE_DTYPE, device=g.device)

    def prefill(self, keys: Tensor) -> None:
        """Quantise the complete blocks of prompts, keys [B, Hkv, T, d]."""
        self._store(slice(None), keys[:, :, : keys.shape[2] // self.block_size * self.block_size], 0)

    def append(self, keys: Tensor, lengths: Tensor, executor: Executor) -> None:
        """Quantise the block before the newest token where that token opens one; ``keys`` is the whole cache."""
        if executor == "fused":
            from ffd.kernels.thumbnails import thumbnail_append

            thumbnail_append(self, keys, lengths)
            return
        for row, length in enumerate(lengths.tolist()):
            if length > 1 and (length - 1) % self.block_size == 0:
                first = length - 1 - self.block_size
                self._store(slice(row, row + 1), keys[row : row + 1, :, first : length - 1], first)

    def _store(self, rows: slice, keys: Tensor, first: int) -> None:
        if not keys.shape[2]:
            return
        codes, half_step = quantize_thumbnails(keys.unflatten(2, (-1, self.block_size)), self.bits)
        block = first // self.block_size
        self.codes[rows, :, first : first + keys.shape[2]] = codes.flatten(2, 3)
        self.half_step[rows, :, block : block + half_step.shape[2]] = half_step

    def scores(self, q: Tensor, scale: float, num_tokens: int) -> Tensor:
        """Scores of the first ``num_tokens`` thumbnails, float32 [B, Hq, num_tokens], natural units.

        ``num_tokens`` is a multiple of the block size.
        """
        operand = scan_operand(q, self.half_step[:, :, : num_tokens // self.block_size], scale)
        levels = 2.0 * unpack_planes(self.codes[:, :, :num_tokens], self.bits).float() - (2**self.bits - 1)
        return operand_scores(operand, levels, self.block_size)
