"""Asymmetric min-max quantisation and the packing of its codes: KIVI's 2 and 4 bits, Twilight's 4.

``x ~ minimum + code * step`` with ``step = (max - min) / (2**bits - 1)`` over a group of values.
Minimum and step are stored in fp16, and codes are chosen against them as stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BOUND_DTYPE = torch.float16
"""Storage of minimum and step."""
BOUND_VECTOR = 16
"""Bounds that lie token by token are read by so many: as many slots, or a multiple, stand in memory."""


@dataclass(frozen=True)
class MinMax:
    """Quantised values; the reduced dimension is kept with size 1 in `minimum` and `step`."""

    codes: Tensor
    """uint8, shape of the values, 0 .. 2**bits - 1."""
    minimum: Tensor
    """float16."""
    step: Tensor
    """float16, zero where a group is constant."""

    @property
    def restored(self) -> Tensor:
        """The values as codes, minimum and step give them, float32."""
        return dequantize_minmax(self.codes, self.minimum, self.step)


def quantize_minmax(x: Tensor, bits: int, dim: int) -> MinMax:
    """Quantise over one dimension.

    Parameters
    ----------
    x
        Floating tensor; ``dim`` is the group of values that share minimum and step.
    bits
        Bits per code, at most 8.
    dim
        Dimension of the group.
    """
    x = x.float()
    levels = 2**bits - 1
    minimum = x.amin(dim, keepdim=True).to(BOUND_DTYPE)
    # A factor, as in the kernels: torch divides by a number so on CUDA but not on the CPU, which shows where a quotient
    # lies half-way between two steps of fp16, as up to one in 140 does at 4 bits (values of one sign).
    step = ((x.amax(dim, keepdim=True) - minimum.float()) * (1.0 / levels)).to(BOUND_DTYPE)
    # A constant group has step 0 (the official code divides 0 by 0): every code then stands for the minimum.
    safe = torch.where(step > 0, step.float(), 1.0)
    # Half rounds up, not to even, because that is one instruction and the same one in the kernels.
    codes = torch.floor((x - minimum.float()) / safe + 0.5).clamp_(0, levels)
    return MinMax(codes.to(torch.uint8), minimum, step)


def dequantize_minmax(codes: Tensor, minimum: Tensor, step: Tensor) -> Tensor:
    """Invert `quantize_minmax`; operands broadcast, float32 comes back."""
    return minimum.float() + codes.float() * step.float()


def pack_planes(codes: Tensor, bits: int, word: torch.dtype = torch.uint8) -> Tensor:
    """Pack codes along the last dimension, in planes.

    Word ``i`` holds channels ``i, i + d/n, ...`` with ``n`` codes a word, the first in its lowest bits: unpacking one
    bit field of a row yields a contiguous part of the channels, which a kernel multiplies with that part of the query.

    Parameters
    ----------
    codes
        uint8 [..., d], values below ``2**bits``.
    bits
        2 or 4; ``d`` a multiple of the codes a word holds.
    word
        uint8 or int16 (two's complement: the last code holds the sign).

    Returns
    -------
    Tensor
        ``word`` [..., d * bits / bits of a word].
    """
    planes = codes.unflatten(-1, (8 * word.itemsize // bits, -1))
    packed = planes[..., 0, :].to(word, copy=True)
    for plane in range(1, planes.shape[-2]):
        packed |= planes[..., plane, :].to(word) << (bits * plane)
    return packed


def unpack_planes(packed: Tensor, bits: int) -> Tensor:
    """Invert `pack_planes`: uint8 or int16 [..., words] -> uint8 [..., d]."""
    mask = 2**bits - 1
    planes = 8 * packed.dtype.itemsize // bits
    return torch.cat([((packed >> (bits * plane)) & mask).to(torch.uint8) for plane in range(planes)], dim=-1)
