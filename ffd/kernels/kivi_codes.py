"""KIVI's codes as tensor-core operands: words of 16 bits, one AND for two codes, nothing dequantised.

A word holds one code of each field, and a field is a contiguous part of the channels (`ffd.minmax.pack_planes`).
Two words of a register pair are neighbours along the product's summed dimension: channels of a key, tokens of a
value. A field masked in place is an fp16 subnormal, as explained at `ffd.kernels.unpack.SUBNORMAL_UNIT`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ffd.kernels.unpack import code_plane, half_product

# What one unit of a field's lowest bits is worth as an fp16 subnormal.
SUBNORMAL_CODE = tl.constexpr(2.0**-24)


@triton.jit
def extended(items, item):
    """A tuple with one more item."""
    return items + (item,)  # noqa: RUF005 (Triton knows no unpacking)


@triton.jit
def code_unit(SUBNORMAL: tl.constexpr):
    """What a code of 1 is worth in `codes_of_field`, but for its field's gain."""
    unit: tl.constexpr = SUBNORMAL_CODE if SUBNORMAL else 1.0
    return unit


@triton.jit
def field_gain(field: tl.constexpr, BITS: tl.constexpr, SUBNORMAL: tl.constexpr):
    """What a field's place in its byte multiplies its codes by, where they are masked in place."""
    gain: tl.constexpr = 2.0 ** (BITS * (field % (8 // BITS))) if SUBNORMAL else 1.0
    return gain


@triton.jit
def nibble_plane(words, plane: tl.constexpr, PTX: tl.constexpr):
    """`code_plane` for codes of 4 bits."""
    if PTX:
        if plane == 0:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x000F000F;", "=r,r", [words], tl.float16, True, 2)
        else:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00F000F0;", "=r,r", [words], tl.float16, True, 2)
    else:
        return (words & (15 << (4 * plane))).to(tl.float16, bitcast=True)


@triton.jit
def codes_of_field(
    words, field: tl.constexpr, BITS: tl.constexpr, OPERAND: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr
):
    """One field of int16 words in type OPERAND, in units of ``code_unit * field_gain``.

    Where hardware flushes subnormals they are converted instead.
    """
    if not SUBNORMAL:
        return ((words >> (BITS * field)) & (2**BITS - 1)).to(OPERAND)
    if field * BITS < 8:
        lower = words
    elif PTX:  # the bits that cross from one word of a pair into the other are masked out next
        lower = tl.inline_asm_elementwise("shr.b32 $0, $1, 8;", "=r,r", [words], tl.int16, True, 2)
    else:
        lower = words >> 8
    plane: tl.constexpr = field % (8 // BITS)
    if BITS == 2:
        codes = code_plane(lower, plane, PTX, True)
    else:
        codes = nibble_plane(lower, plane, PTX)
    return codes.to(OPERAND)


@triton.jit
def operand_product(x, y, PTX: tl.constexpr):
    """``x * y`` in their type, fp16 or fp32, of one shape."""
    if x.dtype == tl.float16:
        return half_product(x, y, PTX)
    else:
        return x * y
