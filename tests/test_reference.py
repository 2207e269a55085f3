"""The fp32 definition of attention, on what its callers may hand it."""

from __future__ import annotations

import pytest
import torch

from ffd.reference import masked_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [1, 3, 4, 8, 64])  # rows of whole words of eight bytes, and others
@pytest.mark.parametrize("layout", ["whole", "slice", "offset", "transposed", "odd"])
def test_what_no_head_attends_to_may_hold_anything(dtype: torch.dtype, d: int, layout: str) -> None:
    """Stale slots may hold NaN or infinity, in any layout; clearing them changes nothing for the caller."""
    g = torch.Generator().manual_seed(d)
    b, hkv, group, n = 2, 3, 2, 9
    scores = torch.randn(b, hkv * group, n, generator=g)
    attended = torch.rand(b, hkv * group, n, generator=g) < 0.3
    attended[:, :, 4] = True
    plain = torch.randn(b, hkv, n, d, generator=g).to(dtype)
    used = attended.unflatten(1, (hkv, group)).any(dim=2)
    stale = plain.masked_fill(~used[..., None], torch.nan)
    stale[:, :, :, ::2] = stale[:, :, :, ::2].where(used[..., None], torch.inf)
    big = torch.full((b, hkv, n + 3, d), torch.nan, dtype=dtype)
    if layout == "slice":
        big[:, :, :n] = stale
        stale = big[:, :, :n]
    elif layout == "offset":
        flat = torch.empty(stale.numel() + 1, dtype=dtype)
        flat[1:] = stale.flatten()
        stale = flat[1:].view(stale.shape)
    elif layout == "transposed":
        stale = stale.mT.contiguous().mT
    elif layout == "odd":
        wide = torch.full((b, hkv, n, d + 1), torch.nan, dtype=dtype)
        wide[..., :d] = stale
        stale = wide[..., :d]
    before = stale.clone()
    out, logsumexp = masked_attention(scores, attended, stale)
    assert torch.equal(stale.nan_to_num(), before.nan_to_num())
    weights = torch.softmax(scores.masked_fill(~attended, -torch.inf), dim=-1).unflatten(1, (hkv, group))
    expected = (weights.double() @ plain.double()).flatten(1, 2)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logsumexp, torch.logsumexp(scores.masked_fill(~attended, -torch.inf), dim=-1))


def test_a_row_that_attends_to_nothing_is_zero() -> None:
    out, logsumexp = masked_attention(
        torch.randn(1, 2, 5), torch.zeros(1, 2, 5, dtype=torch.bool), torch.ones(1, 1, 5, 8)
    )
    assert (out == 0).all()
    assert (logsumexp == -torch.inf).all()
