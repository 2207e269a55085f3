"""Device functions shared by the decode kernels: order of launches, online softmax, counters.

Scores are in log2 units inside kernels (``q . k * scale * log2(e)``), so that ``exp2`` needs no
multiplication. Shapes in comments use ``T`` tokens of a tile, ``GP``/``GM`` padded query heads of a kv
head (columns or rows of a tensor-core tile), ``DP`` padded head_dim and ``DQ`` a padded quarter of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ffd import ledger as _ledger

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)

STEPS = tl.constexpr(_ledger.STEPS)
CONTEXT = tl.constexpr(_ledger.CONTEXT)
SCANNED = tl.constexpr(_ledger.SCANNED)
ESTIMATED = tl.constexpr(_ledger.ESTIMATED)
UNION = tl.constexpr(_ledger.UNION)
FIRST_HEAD = tl.constexpr(_ledger.FIRST_HEAD)


@triton.jit
def follow_previous_launch(PDL: tl.constexpr):
    """Wait until the previous launch is complete and its writes are visible, then let the next one be set up.

    With programmatic dependent launch a kernel's programs start while its predecessor still runs. Every
    kernel that is launched so calls this before it reads or writes what another launch of the step touches.
    The next is admitted only after the wait. So where the previous launch is known to be one of these kernels,
    what precedes that one is complete and visible, and may be read before. After any other kernel nothing may:
    its results are only certain to have reached memory once the wait is over.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def quantised_tokens(length, BLOCK: tl.constexpr):
    """Tokens in blocks that are scanned: those complete before the current token, see `ffd.scan.scanned_tokens`."""
    return tl.maximum(length - 1, 0) // BLOCK * BLOCK


@triton.jit
def prefetch_to_l2(ptr, ELEMENTS: tl.constexpr):
    """Ask for the memory of ``ELEMENTS`` from ``ptr`` on without waiting for it; NVIDIA only.

    Nothing is read, so it may precede a dependent launch's wait whoever writes there.
    """
    size: tl.constexpr = ELEMENTS * ptr.dtype.element_ty.primitive_bitwidth // 8
    for start in tl.static_range(0, size, 32 * 128):
        offset = tl.minimum(start + tl.arange(0, 32) * 128, size - 1)  # a line of 128 bytes each
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptr.to(tl.int64) + offset], tl.int32, False, 1
        )


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
def count_step(counters_ptr, active_ptr, row, row_head, context, scanned, G):
    """Add one step to the ledger row of a kv head, but for what was kept; returns the row's counters and 0 or 1.

    To be called by one program of the step.
    """
    active = tl.load(active_ptr + row).to(tl.int64)
    p_counters = counters_ptr + row_head * (FIRST_HEAD + G)
    tl.store(p_counters + STEPS, tl.load(p_counters + STEPS) + active)
    tl.store(p_counters + CONTEXT, tl.load(p_counters + CONTEXT) + context * active)
    tl.store(p_counters + SCANNED, tl.load(p_counters + SCANNED) + scanned * active)
    return p_counters, active


@triton.jit
def count_selective_step(
    counters_ptr, active_ptr, row, row_head, context, scanned, kept, selected, tail, G, GP: tl.constexpr
):
    """Add one step to the ledger row of a kv head: ``kept`` tokens by the group, ``selected`` [GP] by each head.

    The tail is attended to by all and added to both. To be called by one program of the step; returns what
    `count_step` does.
    """
    p_counters, active = count_step(counters_ptr, active_ptr, row, row_head, context, scanned, G)
    tl.store(p_counters + UNION, tl.load(p_counters + UNION) + (kept + tail) * active)
    o_g = tl.arange(0, GP)
    p_selected = p_counters + FIRST_HEAD + o_g
    counted = tl.load(p_selected, mask=o_g < G, other=0)
    tl.store(p_selected, counted + (selected + tail) * active, mask=o_g < G)
    return p_counters, active
