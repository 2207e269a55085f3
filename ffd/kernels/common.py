"""Device functions shared by the decode kernels: unpacking, online softmax, split reduction, counters.

Scores are in log2 units inside kernels (``q . k * scale * log2(e)``), so that ``exp2`` needs no
multiplication. Shapes in comments use ``T`` tokens of a tile, ``GP``/``GM`` padded query heads of a kv
head (columns or rows of a tensor-core tile), ``DP`` padded head_dim and ``DQ`` a padded quarter of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ffd import ledger as _ledger
from ffd.quantization import INT8_RESIDUAL_STEP

NO_RESIDUAL = tl.constexpr(0)
INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
EXACT = tl.constexpr(3)
RESIDUAL_KINDS = {"none": 0, "int8": 1, "e4m3": 2, "exact": 3}

RESIDUAL_STEP = tl.constexpr(INT8_RESIDUAL_STEP)
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)

STEPS = tl.constexpr(_ledger.STEPS)
CONTEXT = tl.constexpr(_ledger.CONTEXT)
SCANNED = tl.constexpr(_ledger.SCANNED)
UNION = tl.constexpr(_ledger.UNION)
FIRST_HEAD = tl.constexpr(_ledger.FIRST_HEAD)

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


@triton.jit
def online_softmax(row_max, row_sum, acc, scores, values):
    """Fold one tile into the running softmax.

    row_max, row_sum [GM]; acc [GM, DP] fp32; scores [GM, T] log2 units, -inf where absent; values [T, DP].
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has met nothing yet keeps -inf; subtracting it from itself would give NaN.
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    shrink = tl.exp2(row_max - finite_max)
    weights = tl.exp2(scores - finite_max[:, None])
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def online_softmax_by_column(row_max, sums, acc, scores, values):
    """`online_softmax` with the weights' sum left for the end: a sum over a tile's columns crosses warps.

    row_max [GM]; sums [GM, T]; acc [GM, DP] fp32; scores [GM, T] log2 units, -inf where absent; values [T, DP].
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has met nothing yet keeps -inf; subtracting it from itself would give NaN.
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    shrink = tl.exp2(row_max - finite_max)
    weights = tl.exp2(scores - finite_max[:, None])
    sums = sums * shrink[:, None] + weights
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_max, sums, acc


@triton.jit
def store_partial(max_ptr, sum_ptr, acc_ptr, split, row_max, row_sum, acc, G, D, GM: tl.constexpr, DP: tl.constexpr):
    """Write one split's partial [G], [G], [G, D]; a split that met nothing leaves its accumulator unwritten."""
    o_g = tl.arange(0, GM)
    o_d = tl.arange(0, DP)
    tl.store(max_ptr + split * G + o_g, row_max, mask=o_g < G)
    tl.store(sum_ptr + split * G + o_g, row_sum, mask=o_g < G)
    met = (row_max > float("-inf")) & (o_g < G)
    p_acc = acc_ptr + (split * G + o_g)[:, None] * D + o_d[None, :]
    tl.store(p_acc, acc, mask=met[:, None] & (o_d < D)[None, :])


@triton.jit
def arrives_last(counter_ptr, num_programs):
    """Count this program in; true for the last one, which alone sees all partials and rewinds the counter."""
    tl.debug_barrier()  # every thread's partial is written before one thread's release publishes it
    ticket = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = ticket == num_programs - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def reduce_splits(
    max_ptr, sum_ptr, acc_ptr, out_ptr, lse_ptr, G, D, num_splits,
    GP: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr, RETURN_LSE: tl.constexpr,
):  # fmt: skip
    """Combine the partials of one (row, kv head) into out [G, D] and logsumexp [G] (natural units)."""
    o_g = tl.arange(0, GP)
    o_d = tl.arange(0, DP)
    o_s = tl.arange(0, CHUNK)
    m_g = o_g < G
    top = tl.full([GP], float("-inf"), tl.float32)
    for start in range(0, num_splits, CHUNK):
        m_sg = (start + o_s < num_splits)[:, None] & m_g[None, :]
        b_max = tl.load(
            max_ptr + (start + o_s)[:, None] * G + o_g[None, :], mask=m_sg, other=float("-inf"), cache_modifier=".cg"
        )
        top = tl.maximum(top, tl.max(b_max, 0))
    finite_top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for start in range(0, num_splits, CHUNK):
        o_sg = (start + o_s)[:, None] * G + o_g[None, :]
        m_sg = (start + o_s < num_splits)[:, None] & m_g[None, :]
        b_max = tl.load(max_ptr + o_sg, mask=m_sg, other=float("-inf"), cache_modifier=".cg")
        met = b_max > float("-inf")
        weight = tl.where(met, tl.exp2(b_max - finite_top[None, :]), 0.0)
        b_sum = tl.load(sum_ptr + o_sg, mask=met, other=0.0, cache_modifier=".cg")
        total += tl.sum(weight * b_sum, 0)
        # [CHUNK, GP, DP]; accumulators of splits that met nothing were never written
        b_acc = tl.load(
            acc_ptr + o_sg[:, :, None] * D + o_d[None, None, :],
            mask=met[:, :, None] & (o_d < D)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += tl.sum(b_acc * weight[:, :, None], 0)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    p_out = out_ptr + o_g[:, None] * D + o_d[None, :]
    tl.store(p_out, out.to(out_ptr.dtype.element_ty), mask=m_g[:, None] & (o_d < D)[None, :])
    if RETURN_LSE:
        tl.store(lse_ptr + o_g, (top + tl.log2(total)) * LN_2, mask=m_g)


@triton.jit
def count_step(
    counters_ptr, active_ptr, row, row_head, context, scanned, union, selected_ptr, extra, G, COLUMNS: tl.constexpr
):
    """Add one step to the ledger row of a kv head; ``selected_ptr`` [G] int32 tokens, ``extra`` more for each."""
    o_c = tl.arange(0, COLUMNS)
    columns = FIRST_HEAD + G
    selected = tl.load(
        selected_ptr + o_c - FIRST_HEAD, mask=(o_c >= FIRST_HEAD) & (o_c < columns), other=0, cache_modifier=".cg"
    )
    step = tl.where(o_c == STEPS, 1, 0)
    step = tl.where(o_c == CONTEXT, context, step)
    step = tl.where(o_c == SCANNED, scanned, step)
    step = tl.where(o_c == UNION, union, step)
    step = tl.where(o_c >= FIRST_HEAD, selected + extra, step)
    p_counters = counters_ptr + row_head * columns + o_c
    counted = tl.load(p_counters, mask=o_c < columns)
    active = tl.load(active_ptr + row)
    tl.store(p_counters, counted + (step * active).to(tl.int64), mask=o_c < columns)


@triton.jit
def count_selective_step(
    counters_ptr, active_ptr, row, row_head, context, scanned, kept, selected, tail, G, GP: tl.constexpr
):
    """Add one step to the ledger row of a kv head: ``kept`` tokens by the group, ``selected`` [GP] by each head.

    The tail is attended to by all and added to both. To be called by one program of the step.
    """
    active = tl.load(active_ptr + row).to(tl.int64)
    p_counters = counters_ptr + row_head * (FIRST_HEAD + G)
    tl.store(p_counters + STEPS, tl.load(p_counters + STEPS) + active)
    tl.store(p_counters + CONTEXT, tl.load(p_counters + CONTEXT) + context * active)
    tl.store(p_counters + SCANNED, tl.load(p_counters + SCANNED) + scanned * active)
    tl.store(p_counters + UNION, tl.load(p_counters + UNION) + (kept + tail) * active)
    o_g = tl.arange(0, GP)
    p_selected = p_counters + FIRST_HEAD + o_g
    counted = tl.load(p_selected, mask=o_g < G, other=0)
    tl.store(p_selected, counted + (selected + tail) * active, mask=o_g < G)
