"""What products of a few tokens with a weight matrix share: reading the weights is all that they cost.

A multiprocessor needs about 128 KB of weights on their way to draw its share of the memory's bandwidth, and each
warp must own rows that no other reads: the tensor core takes 16 at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl

from ffd.kernels.launch import Hardware

MAX_TOKENS = 16
"""Tokens of one product at most: more have better kernels than these."""


@dataclass(frozen=True)
class Tiling:
    """How a product is cut; the numbers were chosen on an H200 (docs/engine.md)."""

    rows: int
    """Rows of each weight matrix per program: 16 for each warp."""
    depth: int
    """Columns per step."""
    ahead: int
    """Columns on their way at once."""
    programs: int
    """Programs that a multiprocessor is to hold at once."""

    @property
    def warps(self) -> int:
        """Warps per program."""
        return self.rows // 16

    @property
    def stages(self) -> int:
        """Triton's number of pipeline stages: tiles on their way and the one being multiplied."""
        return self.ahead // self.depth + 1


def fit(tiling: Tiling, columns: int, matrices: int, tokens: int, gpu: Hardware) -> Tiling:
    """Fit a tiling to a matrix of few columns and to the shared memory of the GPU."""
    depth = min(tiling.depth, max(16, triton.next_power_of_2(columns)))
    while depth > 64 and columns % depth:  # masked loads only where no tile divides the matrix
        depth //= 2
    share = gpu.shared_memory // tiling.programs - 1024  # of which each program costs the hardware one kilobyte
    per_column = 2 * (matrices * tiling.rows + tokens)
    while depth > 64 and share < 3 * depth * per_column:
        depth //= 2
    buffers = min(tiling.ahead // depth, triton.cdiv(columns, depth), share // (depth * per_column))
    return replace(tiling, depth=depth, ahead=depth * max(2, buffers))


def padded_tokens(tokens: int) -> int:
    """Columns of the tensor-core tile that holds the tokens."""
    return 8 if tokens <= 8 else MAX_TOKENS


@triton.jit
def load_weights(
    w_ptr, first, start, num_rows, num_columns,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr,
):  # fmt: skip
    """[ROWS, DEPTH] of w [num_rows, num_columns], zero outside."""
    o_n = tl.arange(0, ROWS)
    o_k = start + tl.arange(0, DEPTH)
    p_w = w_ptr + first.to(tl.int64) * num_columns + o_n[:, None] * num_columns + o_k[None, :]
    if EVEN_ROWS and EVEN_COLUMNS:
        return tl.load(p_w)
    return tl.load(p_w, mask=(first + o_n < num_rows)[:, None] & (o_k < num_columns)[None, :], other=0.0)


@triton.jit
def load_tokens(
    x_ptr, start, num_tokens, num_columns, TOKENS: tl.constexpr, DEPTH: tl.constexpr, EVEN_COLUMNS: tl.constexpr
):
    """[DEPTH, TOKENS] of x [num_tokens, num_columns], zero outside."""
    o_m = tl.arange(0, TOKENS)
    o_k = start + tl.arange(0, DEPTH)
    mask = (o_m < num_tokens)[None, :]
    if not EVEN_COLUMNS:
        mask = mask & (o_k < num_columns)[:, None]
    return tl.load(x_ptr + o_m[None, :] * num_columns + o_k[:, None], mask=mask, other=0.0)


@triton.jit
def store_product(out_ptr, product, first, num_rows, num_tokens, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Write [ROWS, TOKENS] to out [num_tokens, num_rows]."""
    o_n = first + tl.arange(0, ROWS)
    o_m = tl.arange(0, TOKENS)
    mask = (o_n < num_rows)[:, None] & (o_m < num_tokens)[None, :]
    tl.store(out_ptr + o_m[None, :] * num_rows + o_n[:, None], product.to(out_ptr.dtype.element_ty), mask=mask)
