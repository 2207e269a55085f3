"""Bit layouts of the key cache: 2-bit thumbnails, their scales, and the residuals that refine them.

One place for every layout, each with its pure-torch inverse. The rule is the "symmetric mid-rise"
quantiser of the FFD paper (section 3.1), computed in fp32 whatever the model's dtype: the official
code rounds the scale in the model's dtype and loses what the residual should have restored.

A key channel ``c`` of one block has the amplitude ``A_c = max |k_jc|`` over the block's tokens. A
2-bit code ``u`` stands for ``(2u - 3) * h_c``, odd multiples of the half step ``h_c``:

====== ============= ============================ =====================
levels half step     values                       largest error
====== ============= ============================ =====================
edge   ``A_c / 3``   ``-A, -A/3, +A/3, +A``       ``A/3`` (published)
cell   ``A_c / 4``   ``-3A/4, -A/4, +A/4, +3A/4`` ``A/4`` (classic mid-rise)
====== ============= ============================ =====================

In both the residual ``k - khat`` lies in ``[-h, h]``, so that an ``int8`` residual needs no scale of
its own: its step is ``2h / 255``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Levels = Literal["edge", "cell"]
Residual = Literal["int8", "e4m3", "none", "exact"]

LEVELS: tuple[Levels, ...] = ("edge", "cell")
RESIDUALS: tuple[Residual, ...] = ("int8", "e4m3", "none", "exact")

CODES_PER_BYTE = 4
SCALE_DTYPE = torch.float16
"""Half steps are stored in 16 bits: 2 * head_dim / block_size bytes a token beside the codes' head_dim / 4."""

INT8_RESIDUAL_STEP = 2.0 / 255.0
"""Step of the int8 residual in units of the half step."""

LEVEL_STEP = {"edge": 1.0 / 3.0, "cell": 1.0 / 4.0}
"""Half step in units of the amplitude; multiplied, not divided, which rounds alike on every device."""


def residual_dtype(residual: Residual, key_dtype: torch.dtype) -> torch.dtype | None:
    """Storage dtype of the refinement buffer, or None where nothing is stored."""
    if residual == "int8":
        return torch.int8
    if residual == "e4m3":
        return torch.float8_e4m3fn
    return key_dtype if residual == "exact" else None


@dataclass(frozen=True)
class QuantizedBlocks:
    """Keys of whole blocks in storage form; leading dimensions are the caller's."""

    codes: Tensor
    """uint8 [..., block_size, head_dim / 4], packed by `pack_codes`."""
    half_step: Tensor
    """float16 [..., head_dim], one per block and channel."""
    residual: Tensor | None
    """[..., block_size, head_dim] in `residual_dtype`, or None."""


def pack_codes(codes: Tensor) -> Tensor:
    """Pack 2-bit codes four to a byte, in planes.

    Byte ``i`` holds channels ``i, i + d/4, i + 2d/4, i + 3d/4`` in bit pairs 0, 2, 4, 6: unpacking one
    bit pair of a row yields a contiguous quarter of the channels, which a kernel multiplies with a
    contiguous quarter of the query.

    Parameters
    ----------
    codes
        Integer tensor [..., d] with values 0..3; ``d`` a multiple of 4.

    Returns
    -------
    Tensor
        uint8 [..., d / 4].
    """
    planes = codes.to(torch.uint8).unflatten(-1, (CODES_PER_BYTE, -1))
    packed = planes[..., 0, :].clone()
    for plane in range(1, CODES_PER_BYTE):
        packed |= planes[..., plane, :] << (2 * plane)
    return packed


def unpack_codes(packed: Tensor) -> Tensor:
    """Invert `pack_codes`: uint8 [..., d / 4] -> uint8 [..., d] with values 0..3."""
    shifts = torch.arange(0, 8, 8 // CODES_PER_BYTE, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-2) >> shifts[:, None]) & 3).flatten(-2)


def odd_levels(packed: Tensor) -> Tensor:
    """Thumbnail values in units of the half step.

    Parameters
    ----------
    packed
        uint8 [..., d / 4].

    Returns
    -------
    Tensor
        float32 [..., d] with values -3, -1, 1, 3. Odd integers need no zero point, hence no
        cancelling sum over the query (the official kernel subtracts ``1.5 * sum(q * scale)``).
    """
    lowest = torch.tensor(-3.0, dtype=torch.float32)
    return torch.add(lowest, unpack_codes(packed), alpha=2)  # one pass over what is large


def quantize_blocks(keys: Tensor, levels: Levels, residual: Residual) -> QuantizedBlocks:
    """Quantise whole blocks of keys.

    Parameters
    ----------
    keys
        Floating tensor [..., block_size, head_dim]; post-RoPE, centred if the method centres.
    levels
        Placement of the four levels, see the module's table.
    residual
        What refines the thumbnail: ``int8`` (step ``2h/255``), ``e4m3`` (unscaled fp8, the official
        format), ``none``, or ``exact`` (the keys themselves, for tests).

    Returns
    -------
    QuantizedBlocks
        Codes, half steps and residual. Codes and residual are computed against the half step as
        stored, so that its rounding is part of what the residual restores.
    """
    k = keys.float()
    half_step = (k.abs().amax(dim=-2) * LEVEL_STEP[levels]).to(SCALE_DTYPE)
    h = half_step.float().unsqueeze(-2)
    # A channel whose amplitude underflows has h == 0: every code then stands for 0, whatever it is.
    safe = torch.where(h > 0, h, torch.ones_like(h))
    # Nearest level, by its boundaries -2h, 0, 2h: comparisons are exact on every device.
    codes = (k > -2.0 * h).float() + (k >= 0.0) + (k > 2.0 * h)
    stored: Tensor | None = None
    if residual == "exact":
        stored = keys
    elif residual != "none":
        remainder = k - (codes * 2.0 - 3.0) * h
        if residual == "int8":
            stored = torch.round(remainder / (safe * INT8_RESIDUAL_STEP)).clamp_(-127, 127).to(torch.int8)
        else:
            limit = torch.finfo(torch.float8_e4m3fn).max  # the cast saturates on some devices and not on others
            stored = remainder.clamp(-limit, limit).to(torch.float8_e4m3fn)
    return QuantizedBlocks(pack_codes(codes), half_step, stored)


def dequantize_blocks(blocks: QuantizedBlocks) -> Tensor:
    """Invert `quantize_blocks` up to the residual's precision: float32 [..., block_size, head_dim]."""
    if blocks.residual is not None and blocks.residual.dtype not in (torch.int8, torch.float8_e4m3fn):
        return blocks.residual.float()
    h = blocks.half_step.float().unsqueeze(-2)
    keys = odd_levels(blocks.codes) * h
    if blocks.residual is not None:
        if blocks.residual.dtype == torch.int8:
            keys += blocks.residual.float() * INT8_RESIDUAL_STEP * h
        else:
            keys += blocks.residual.float()
    return keys
