"""Corners of FFD's rule that no general test is sure to meet."""

from __future__ import annotations

import pytest
import torch

from ffd.methods import LayerGeometry, RowState, create


def layer_of(lengths, keys, values, **knobs):
    rows = RowState.allocate(len(lengths), "cpu")
    rows.lengths.copy_(torch.tensor(lengths))
    geometry = LayerGeometry(len(lengths), 2, 1, 64, 256, torch.float32, torch.device("cpu"))
    layer = create("ffd", {"block_size": 64, **knobs}).new_layer(geometry, rows, "reference")
    layer.prefill(keys, values)
    return layer


def test_a_row_never_attends_to_nothing():
    # At delta 0 every thumbnail may miss a pseudo-maximum of refined scores; the output was once zero. The block
    # that the current token completes is still the tail of that step.
    torch.manual_seed(0)
    missed = 0
    for _ in range(40):
        keys, values = torch.randn(2, 1, 128, 64), torch.randn(2, 1, 128, 64)
        q = torch.randn(2, 2, 64)
        layer = layer_of((128, 100), keys, values, delta=0.0, sub_block=16)
        selection = layer.select(q, 0.125)
        assert selection.attended[:, :, 64:100].all()
        assert selection.attended[0, :, 100:128].all()
        missed += not selection.attended[0, :, :64].any()
    assert missed > 0  # the case that the rule is for does occur


@pytest.mark.parametrize("pseudo_max", ["refined", "scan"])
def test_a_small_sink_key_fools_the_scan_and_not_the_refined_pseudo_maximum(pseudo_max):
    # As on SmolLM2: token 0's key is a fraction of its neighbours', so four levels cannot express it.
    torch.manual_seed(1)
    keys = torch.randn(1, 1, 200, 64) * 3
    q = torch.randn(1, 2, 64)
    keys[:, :, 0] = torch.sign(q[:, :1]) * 0.2  # every channel small and aligned with the query
    layer = layer_of((200,), keys, torch.randn(1, 1, 200, 64), pseudo_max=pseudo_max, n_sink=1, n_local=1)
    exact = (q @ keys[0, 0].T * 0.125)[0]
    true_near = torch.maximum(exact[:, 0], exact[:, -1])
    excess = (layer.select(q, 0.125).pseudo_max[0] - true_near)[0]
    if pseudo_max == "refined":
        assert excess.abs() < 0.05
    else:
        assert excess > 1.0


def test_per_head_selection_attends_to_what_the_head_itself_keeps_and_reads_the_same():
    torch.manual_seed(3)
    keys, values, q = torch.randn(1, 1, 250, 64), torch.randn(1, 1, 250, 64), 3 * torch.randn(1, 2, 64)
    group, head = (
        layer_of((250,), keys, values, delta=1.0, sub_block=16, select_per=per).select(q, 0.125)
        for per in ("group", "head")
    )
    assert torch.equal(head.selected, group.selected)
    assert torch.equal(head.attended, head.selected)
    assert bool((group.attended & ~head.attended).any())
    assert torch.equal(head.union(1), group.union(1))
