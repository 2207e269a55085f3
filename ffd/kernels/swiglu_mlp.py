"""First half of a SwiGLU MLP of a few tokens: gate, up and ``silu(gate) * up`` in one launch."""

from __future__ import annotations

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

TILING = Tiling(rows=16, depth=128, ahead=384, programs=7)
"""All of Llama-3.1-8B's rows in one wave."""


@triton.jit
def _swiglu_kernel(
    x_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, out_ptr, num_tokens, num_rows, num_columns,
    HAS_BIAS: tl.constexpr, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROWS rows,). x [M, K]; gate, up [N, K]; biases [N]; out [M, N]."""
    first = tl.program_id(0) * ROWS
    follow_previous_launch(PDL)
    gate = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(0, num_columns, DEPTH, num_stages=STAGES):
        b_gate = load_weights(gate_ptr, first, start, num_rows, num_columns, ROWS, DEPTH, EVEN_ROWS, EVEN_COLUMNS)
        b_up = load_weights(up_ptr, first, start, num_rows, num_columns, ROWS, DEPTH, EVEN_ROWS, EVEN_COLUMNS)
        b_x = load_tokens(x_ptr, start, num_tokens, num_columns, TOKENS, DEPTH, EVEN_COLUMNS).to(COMPUTE)
        gate = tl.dot(b_gate.to(COMPUTE), b_x, gate, input_precision="ieee")
        up = tl.dot(b_up.to(COMPUTE), b_x, up, input_precision="ieee")
    if HAS_BIAS:
        o_n = first + tl.arange(0, ROWS)
        gate += tl.load(gate_bias_ptr + o_n, mask=o_n < num_rows, other=0.0).to(tl.float32)[:, None]
        up += tl.load(up_bias_ptr + o_n, mask=o_n < num_rows, other=0.0).to(tl.float32)[:, None]
    # Rounded where the modules round: gate, up, silu(gate), product.
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    store_product(out_ptr, silu * up.to(dtype).to(tl.float32), first, num_rows, num_tokens, ROWS, TOKENS)


def swiglu(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> Tensor:
    """``silu(gate(x)) * up(x)``.

    Parameters
    ----------
    x
        [..., K], fp16 or bf16, at most `MAX_TOKENS` tokens.
    gate, up
        [N, K] in the dtype of ``x``, contiguous, at addresses that 16 divides.
    gate_bias, up_bias
        [N], both or neither.

    Returns
    -------
    Tensor
        [..., N].
    """
    gpu = hardware(x.device)
    columns = x.shape[-1]
    flat = x.reshape(-1, columns)
    tokens = padded_tokens(flat.shape[0])
    t = fit(TILING, columns, 2, tokens, gpu)
    out = x.new_empty(*x.shape[:-1], gate.shape[0])
    biased = gate_bias is not None and up_bias is not None
    _swiglu_kernel[(triton.cdiv(gate.shape[0], t.rows),)](
        flat, gate, up, gate_bias if biased else gate, up_bias if biased else up, out,
        flat.shape[0], gate.shape[0], columns,
        HAS_BIAS=biased, EVEN_ROWS=gate.shape[0] % t.rows == 0, EVEN_COLUMNS=columns % t.depth == 0,
        ROWS=t.rows, DEPTH=t.depth, TOKENS=tokens, STAGES=t.stages, COMPUTE=compute_dtype(x.dtype),
        PDL=gpu.dependent_launch, num_warps=t.warps, **gpu.launch_options,
    )  # fmt: skip
    return out
