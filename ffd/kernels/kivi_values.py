"""Weighted sum of KIVI's quantised values: ``sum(p * minimum) + sum((p * step) * code)``, channels as rows.

For each group of channels the weights times the group's steps are the operand. The minima's part is summed by group,
with rows of ones beside it that sum the weights, and added to the group's channels when all is done.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ffd.kernels.kivi_codes import code_unit, codes_of_field, extended, field_gain, operand_product

# Weights are at most 2**4, not 1: times a small step they reach down into fp16's subnormals that much later. Steps
# up to 4094 are safe from overflow.
WEIGHT_BITS = tl.constexpr(4)


@triton.jit
def load_value_words(words_ptr, count, WORDS: tl.constexpr, WP: tl.constexpr, TILE: tl.constexpr):
    """Codes of the next TILE tokens, of which ``count`` exist, int16 [WP, TILE]."""
    o_t = tl.arange(0, TILE)[None, :]
    o_w = tl.arange(0, WP)[:, None]
    return tl.load(words_ptr + o_t * WORDS + o_w, mask=(o_t < count) & (o_w < WORDS), other=0)


@triton.jit
def load_value_steps(step_ptr, count, stride, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Steps of the next TILE tokens, a tuple of fp16 [TILE] by groups of channels; ``count`` of whole vectors exist."""
    o_t = tl.arange(0, TILE)
    steps = ()
    for group in tl.static_range(GROUPS):
        steps = extended(steps, tl.load(step_ptr + group * stride + o_t, mask=o_t < count, other=0.0))
    return steps


@triton.jit
def load_value_minima(minimum_ptr, count, stride, GROUPS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Minima of the next TILE tokens, one group a row, fp16 [ROWS, TILE]; ``count`` of whole vectors exist.

    Rows beyond the groups repeat them: addresses of their own would cost registers.
    """
    o_t = tl.arange(0, TILE)[None, :]
    o_r = tl.arange(0, ROWS)[:, None] % GROUPS
    return tl.load(minimum_ptr + o_r * stride + o_t, mask=o_t < count, other=0.0)


@triton.jit
def add_minima(sums, minima, weights, shrink, OPERAND: tl.constexpr):
    """``sums * shrink + sum(p * minimum)`` by groups in the first half of the rows, ``sum(p)`` in the second."""
    o_r = tl.arange(0, minima.shape[0])[:, None]
    rows = tl.where(o_r < minima.shape[0] // 2, minima.to(OPERAND), 1.0)
    return tl.dot(rows, weights, sums * shrink[None, :], input_precision="ieee")


@triton.jit
def add_field(
    acc, words, weights, steps, field: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    OPERAND: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """``acc + sum((p * step) * code)`` of a field's channels, fp32 [WP, COLUMNS], in units `restored_sum` knows.

    A field may reach over several groups, where neither is a multiple of the other: then once for each of them.
    """
    codes = codes_of_field(words, field, BITS, OPERAND, PTX, SUBNORMAL)
    first: tl.constexpr = field * WORDS // GROUP
    last: tl.constexpr = ((field + 1) * WORDS - 1) // GROUP
    group_of_row = (field * WORDS + tl.arange(0, words.shape[0])) // GROUP
    for group in tl.static_range(first, last + 1):
        step = tl.broadcast_to(steps[group].to(OPERAND)[:, None], weights.shape)
        operand = operand_product(weights, step, PTX)
        part = tl.where((group_of_row == group)[:, None], codes, 0.0) if first < last else codes
        acc = tl.dot(part, operand, acc, input_precision="ieee")
    return acc


@triton.jit
def add_codes(
    sums, words, weights, steps, shrink, WORDS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    OPERAND: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """``sums * shrink`` and `add_field` for every field of a tuple."""
    added = ()
    for field in tl.static_range(16 // BITS):
        acc = sums[field] * shrink[None, :]
        acc = add_field(acc, words, weights, steps, field, WORDS, BITS, GROUP, OPERAND, PTX, SUBNORMAL)
        added = extended(added, acc)
    return added


@triton.jit
def restored_sum(
    acc, minima, field: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """Weighted sum of values of a field's channels, fp32 [WP, COLUMNS], from its codes' and all groups' minima's."""
    first: tl.constexpr = field * WORDS // GROUP
    last: tl.constexpr = ((field + 1) * WORDS - 1) // GROUP
    group_of_row = (field * WORDS + tl.arange(0, acc.shape[0])) // GROUP
    o_r = tl.arange(0, minima.shape[0])
    acc = acc * (1.0 / (code_unit(SUBNORMAL) * field_gain(field, BITS, SUBNORMAL)))
    for group in tl.static_range(first, last + 1):
        of_group = tl.sum(tl.where((o_r == group)[:, None], minima, 0.0), 0)[None, :]
        acc += tl.where((group_of_row == group)[:, None], of_group, 0.0) if first < last else of_group
    return acc
