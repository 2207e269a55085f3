"""The bit layouts and their inverses."""

from __future__ import annotations

import pytest
import torch

from ffd.quantization import LEVELS, RESIDUALS, dequantize_blocks, pack_codes, quantize_blocks, unpack_codes


@pytest.mark.parametrize("d", [64, 80, 96, 128])
def test_packing_is_inverted(d):
    codes = torch.randint(0, 4, (3, 5, d), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_codes(pack_codes(codes)), codes)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("residual", RESIDUALS)
def test_keys_come_back_to_the_precision_of_their_residual(levels, residual):
    keys = torch.randn(2, 64, 80, generator=torch.Generator().manual_seed(1)) * 3
    keys[..., 7] = 0.0  # a channel without amplitude
    blocks = quantize_blocks(keys, levels, residual)
    error = (dequantize_blocks(blocks) - keys).abs()
    half_step = blocks.half_step.float().unsqueeze(-2)
    # Rounding of the stored half step (2^-11, three times over) comes on top of each bound.
    bound = {"none": 1.0, "int8": 1.5 / 255, "e4m3": 2.0**-4, "exact": 0.0}[residual] + (residual == "none") * 2e-3
    assert (error <= bound * half_step + 1e-9).all()
    assert torch.equal(error[..., 7], torch.zeros_like(error[..., 7]))
