"""Device functions that turn stored keys into tensor-core operands with few instructions a value."""

from __future__ import annotations

import triton
import triton.language as tl

from ffd.quantization import INT8_RESIDUAL_STEP

NO_RESIDUAL = tl.constexpr(0)
INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
EXACT = tl.constexpr(3)
RESIDUAL_KINDS = {"none": 0, "int8": 1, "e4m3": 2, "exact": 3}

RESIDUAL_STEP = tl.constexpr(INT8_RESIDUAL_STEP)

# A 2-bit code u of plane p is read as the fp16 bit pattern u << 2p, the subnormal u * 4**p * 2**-24:
# one AND widens two codes, and tensor cores multiply subnormals exactly. The query operand of plane p
# carries 4**(1 - p), so that every plane's product is u * q * 4 * 2**-24, and this factor turns the sum
# into 2 * u * q, the thumbnail 2u - 3 short of its zero point.
SUBNORMAL_UNIT = tl.constexpr(2.0**23)
# Where hardware flushes subnormals the codes are converted instead: the same without the 2**-24.
CONVERTED_UNIT = tl.constexpr(0.5)


@triton.jit
def half_product(query, half_step, PTX: tl.constexpr):
    """``query * half_step`` rounded to fp16, both fp16 of one shape: two products an instruction."""
    if PTX:
        return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [query, half_step], tl.float16, True, 2)
    else:
        return query * half_step


@triton.jit
def widen_codes(packed, PTX: tl.constexpr):
    """Packed bytes to 16 bits each, uint8 -> int16, two byte permutations for four bytes."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;",
            "=r,=r,r",
            [packed],
            dtype=tl.int16,
            is_pure=True,
            pack=4,
        )
    else:
        return packed.to(tl.int16)


@triton.jit
def code_plane(wide, plane: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr):
    """Codes of one bit pair as fp16, in units explained at `SUBNORMAL_UNIT`."""
    if PTX:
        if plane == 0:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00030003;", "=r,r", [wide], tl.float16, True, 2)
        elif plane == 1:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x000C000C;", "=r,r", [wide], tl.float16, True, 2)
        elif plane == 2:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00300030;", "=r,r", [wide], tl.float16, True, 2)
        else:
            return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00C000C0;", "=r,r", [wide], tl.float16, True, 2)
    else:
        bits = wide & (3 << (2 * plane))
        return bits.to(tl.float16, bitcast=True) if SUBNORMAL else bits.to(tl.float16)


@triton.jit
def int8_to_half(residual, plane: tl.constexpr, PTX: tl.constexpr):
    """int8 times 4**(plane - 1) as fp16, exactly: undoes the gain of the plane's query operand.

    The hardware's own conversion runs at a quarter of the rate. A byte pasted under the exponent of 1024
    reads 1024 + byte; flipping its sign bit first makes the byte residual + 128, hence the 1152.
    """
    if PTX:
        if plane == 0:
            return paste_bytes(residual, "mov.b32 gain, 0x34003400; mov.b32 offset, 0xDC80DC80;")  # 1/4, -288
        elif plane == 1:
            return paste_bytes(residual, "mov.b32 gain, 0x3C003C00; mov.b32 offset, 0xE480E480;")  # 1, -1152
        elif plane == 2:
            return paste_bytes(residual, "mov.b32 gain, 0x44004400; mov.b32 offset, 0xEC80EC80;")  # 4, -4608
        else:
            return paste_bytes(residual, "mov.b32 gain, 0x4C004C00; mov.b32 offset, 0xF480F480;")  # 16, -18432
    else:
        return (residual.to(tl.float32) * (4.0 ** (plane - 1))).to(tl.float16)


@triton.jit
def paste_bytes(residual, constants: tl.constexpr):
    """``residual * gain`` of four bytes at a time, see `int8_to_half`; ``constants`` sets gain and -1152 * gain."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 biased, gain, offset; "
        + constants
        + """
        xor.b32 biased, $2, 0x80808080;
        prmt.b32 $0, biased, 0x64646464, 0x5140;
        prmt.b32 $1, biased, 0x64646464, 0x7362;
        fma.rn.f16x2 $0, $0, gain, offset;
        fma.rn.f16x2 $1, $1, gain, offset;
        }""",
        "=&r,=&r,r",
        [residual],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_to_half(bits):
    """e4m3 bit pattern (uint8) -> fp16 of value / 256: the exponents differ by 8 in bias, subnormals included."""
    wide = bits.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
