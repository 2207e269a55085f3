from __future__ import annotations

import pytest
import torch

from ffd.kernels.dense_decode import dense_decode
from ffd.kernels.kv_append import kv_append
from ffd.ledger import Ledger
from ffd.methods import LayerGeometry, RowState
from ffd.methods.dense import Dense


@pytest.mark.parametrize(
    ("lengths", "group", "head_dim", "dtype"),
    [
        ((1,), 4, 64, torch.float16),
        ((64, 130, 65), 3, 80, torch.float16),
        ((100,), 7, 96, torch.float32),
        ((90, 3), 1, 128, torch.bfloat16),
        ((150,), 8, 64, torch.float16),
    ],
)
def test_dense_equals_the_reference(lengths: tuple[int, ...], group: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = RowState.allocate(len(lengths), "cpu")
    rows.lengths.copy_(torch.tensor(lengths))
    hkv = 2
    geometry = LayerGeometry(len(lengths), hkv * group, hkv, head_dim, 192, dtype, torch.device("cpu"))
    layer = Dense().new_layer(geometry, rows, "reference")
    layer.keys.normal_()
    layer.values.normal_()
    for row, length in enumerate(lengths):
        layer.keys[row, :, length:] = torch.nan
        layer.values[row, :, length:] = torch.nan
    q = torch.randn(len(lengths), hkv * group, head_dim).to(dtype)
    scale = head_dim**-0.5
    want, _ = layer.decode_reference(q, scale)
    ledger = Ledger(len(lengths), hkv, hkv * group, torch.device("cpu"), rows.active)
    for _ in range(2):
        out = dense_decode(q, layer.keys, layer.values, rows.lengths, scale, ledger)
        tolerance = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
    assert torch.equal(ledger.counters, 2 * layer.ledger.counters)


def test_token_goes_to_its_row_position() -> None:
    cache = torch.zeros(2, 2, 8, 24, dtype=torch.float16)
    values = torch.zeros_like(cache)
    lengths = torch.tensor([3, 8], dtype=torch.int32)
    token = torch.randn(2, 1, 2, 24).half().transpose(1, 2)  # strided, as a model hands it over
    kv_append(token, -token, cache, values, lengths)
    want = torch.zeros_like(cache)
    want[0, :, 2], want[1, :, 7] = token[0, :, 0], token[1, :, 0]
    assert torch.equal(cache, want)
    assert torch.equal(values, -want)
