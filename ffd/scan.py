"""The scan's arithmetic in the fp32 reference, the same for FFD's thumbnails and for those of other widths."""

from __future__ import annotations

import math

from torch import Tensor

from ffd import reference
from ffd.quantization import SCALE_DTYPE

LOG2_E = math.log2(math.e)


def scanned_tokens(lengths: Tensor, block_size: int) -> Tensor:
    """Tokens of complete blocks before the current token: what a step at these lengths scans."""
    return (lengths - 1).clamp(min=0) // block_size * block_size


def scan_operand(q: Tensor, half_step: Tensor, scale: float) -> Tensor:
    """The query times the half steps of every block, float32 [B, Hkv, blocks, G, d], log2 units.

    The query and the product are rounded to fp16 as in the kernels, so that both executors test the same numbers.

    Parameters
    ----------
    q
        [B, Hq, d].
    half_step
        [B, Hkv, blocks, d].
    scale
        Softmax scale.
    """
    query = (reference.group_heads(q.float(), half_step.shape[1]) * (scale * LOG2_E)).to(SCALE_DTYPE).float()
    return (query[:, :, None] * half_step[:, :, :, None].float()).to(SCALE_DTYPE).float()


def operand_scores(operand: Tensor, tokens: Tensor, block_size: int) -> Tensor:
    """Scores of tokens in half steps [B, Hkv, blocks * block_size, d]: float32 [B, Hq, T], natural units."""
    scores = operand @ tokens.unflatten(2, (operand.shape[2], block_size)).transpose(-1, -2)
    return scores.permute(0, 1, 3, 2, 4).flatten(3, 4).flatten(1, 2) / LOG2_E
