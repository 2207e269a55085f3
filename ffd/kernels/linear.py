"""Linear layers of a few tokens: up to three that share their input in one launch, a residual added on the way out.

Every program owns some rows of one weight matrix and all of the columns: no partial sums, hence the same result
on every run. Weights are the long side of the tensor-core product, so that 1 to 16 tokens cost the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import follow_previous_launch
from ffd.kernels.launch import compute_dtype, hardware
from ffd.kernels.weights import (
    Tiling,
    fit,
    load_tokens,
    load_weights,
    padded_tokens,
    store_product,
)


@triton.jit
def _linear_kernel(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, bias0_ptr, bias1_ptr, bias2_ptr, residual_ptr, out0_ptr, out1_ptr, out2_ptr,
    num_tokens, num_columns, rows0, rows1, rows2,
    MATRICES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVEN_ROWS: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROWS rows, those of w0 first). x [M, K]; w [N, K]; bias [N]; residual, out [M, N]."""
    block = tl.program_id(0)
    w_ptr, bias_ptr, out_ptr, num_rows = w0_ptr, bias0_ptr, out0_ptr, rows0
    # Selected, not branched to: branches would each have their own buffers, and a branch hides the alignment.
    if MATRICES > 1:
        blocks0 = tl.cdiv(rows0, ROWS)
        second = block >= blocks0
        w_ptr = tl.where(second, w1_ptr, w_ptr)
        bias_ptr = tl.where(second, bias1_ptr, bias_ptr)
        out_ptr = tl.where(second, out1_ptr, out_ptr)
        num_rows = tl.where(second, rows1, num_rows)
        block = tl.where(second, block - blocks0, block)
    if MATRICES > 2:
        blocks1 = tl.cdiv(rows1, ROWS)
        third = second & (block >= blocks1)
        w_ptr = tl.where(third, w2_ptr, w_ptr)
        bias_ptr = tl.where(third, bias2_ptr, bias_ptr)
        out_ptr = tl.where(third, out2_ptr, out_ptr)
        num_rows = tl.where(third, rows2, num_rows)
        block = tl.where(third, block - blocks1, block)
    first = block * ROWS
    follow_previous_launch(PDL)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(0, num_columns, DEPTH, num_stages=STAGES):
        b_w = load_weights(w_ptr, first, start, num_rows, num_columns, ROWS, DEPTH, EVEN_ROWS, EVEN_COLUMNS)
        b_x = load_tokens(x_ptr, start, num_tokens, num_columns, TOKENS, DEPTH, EVEN_COLUMNS)
        acc = tl.dot(b_w.to(COMPUTE), b_x.to(COMPUTE), acc, input_precision="ieee")
    o_n = first + tl.arange(0, ROWS)
    o_m = tl.arange(0, TOKENS)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + o_n, mask=o_n < num_rows, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        mask = (o_n < num_rows)[:, None] & (o_m < num_tokens)[None, :]
        b_r = tl.load(residual_ptr + o_m[None, :] * num_rows + o_n[:, None], mask=mask, other=0.0).to(tl.float32)
        acc = b_r + acc.to(out_ptr.dtype.element_ty).to(tl.float32)  # rounded as the two modules round it
    store_product(out_ptr, acc, first, num_rows, num_tokens, ROWS, TOKENS)


def choose(rows: int, multiprocessors: int) -> Tiling:
    """Tiling of matrices that have ``rows`` rows together: one wave of programs where the rows allow it."""
    if 16 * multiprocessors < rows <= 32 * multiprocessors:
        return Tiling(rows=32, depth=256, ahead=1536, programs=1)
    if rows <= 48 * multiprocessors:
        return Tiling(rows=16, depth=256, ahead=1536, programs=3)
    return Tiling(rows=32, depth=256, ahead=1024, programs=2)


def linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None, residual: Tensor | None = None
) -> list[Tensor]:
    """``x @ weight.T + bias`` for each weight, sums in fp32, rounded once.

    Parameters
    ----------
    x
        [..., K], fp16 or bf16, at most `MAX_TOKENS` tokens.
    weights
        One to three matrices [N, K] in the dtype of ``x``, contiguous, at addresses that 16 divides.
    biases
        [N] for each weight, or None.
    residual
        [..., N], added after the product was rounded; for one weight only.

    Returns
    -------
    list[Tensor]
        [..., N] for each weight.
    """
    gpu = hardware(x.device)
    columns = x.shape[-1]
    flat = x.reshape(-1, columns)
    tokens = padded_tokens(flat.shape[0])
    sizes = [w.shape[0] for w in weights]
    t = fit(choose(sum(sizes), gpu.multiprocessors), columns, 1, tokens, gpu)
    outs = [x.new_empty(*x.shape[:-1], n) for n in sizes]
    last = len(weights) - 1
    w, out, bias, rows = (
        [series[min(i, last)] for i in range(3)] for series in (weights, outs, biases or weights, sizes)
    )
    _linear_kernel[(sum(triton.cdiv(n, t.rows) for n in sizes),)](
        flat, *w, *bias, flat if residual is None else residual.contiguous(), *out, flat.shape[0], columns, *rows,
        MATRICES=len(weights), HAS_BIAS=biases is not None, HAS_RESIDUAL=residual is not None,
        EVEN_ROWS=all(n % t.rows == 0 for n in sizes), EVEN_COLUMNS=columns % t.depth == 0,
        ROWS=t.rows, DEPTH=t.depth, TOKENS=tokens, STAGES=t.stages, COMPUTE=compute_dtype(x.dtype),
        PDL=gpu.dependent_launch, num_warps=t.warps, **gpu.launch_options,
    )  # fmt: skip
    return outs
