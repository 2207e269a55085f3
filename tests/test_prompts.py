"""Prompts of a batch: which are refused, and how ragged ones are padded."""

from __future__ import annotations

import pytest
import torch

from ffd.graph import resolve_graph
from ffd.prompts import in_chunks, left_padded, require_room
from ffd.support import UnsupportedModelError
from tests.tiny import tiny_model

CPU = torch.device("cpu")


def test_ragged_prompts_end_in_one_column() -> None:
    ids, positions, mask = left_padded([[7, 8, 9], [5]], CPU)
    assert ids.tolist() == [[7, 8, 9], [0, 0, 5]]
    assert positions.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert mask is not None
    assert mask.tolist() == [[True, True, True], [False, False, True]]


def test_prompts_of_one_length_need_no_mask() -> None:
    ids, positions, mask = left_padded([[7, 8], [5, 6]], CPU)
    assert ids.tolist() == [[7, 8], [5, 6]]
    assert positions.tolist() == [[0, 1], [0, 1]]
    assert mask is None


def test_room_is_for_all_tokens_but_the_last() -> None:
    require_room([3, 5], 4, rows=2, capacity=8)
    for lengths, new, message in (
        ([3, 5], 5, r"^prompt of 5 and max_new_tokens=5 exceed capacity=8$"),
        ([3, 5], 0, r"^max_new_tokens=0: expected at least 1$"),
        ([3], 1, r"^prompt lengths \[3\]: expected 2 rows of at least one token$"),
        ([3, 0], 1, r"^prompt lengths \[3, 0\]: expected 2 rows of at least one token$"),
    ):
        with pytest.raises(ValueError, match=message):
            require_room(lengths, new, rows=2, capacity=8)


def test_why_steps_are_eager() -> None:
    config = tiny_model("llama").config
    assert resolve_graph("auto", config, 0, CPU) == resolve_graph(False, config, 0, CPU) == (
        "device cpu has no CUDA graphs"
    )  # fmt: skip
    gpu = torch.device("cuda")  # named, not used
    assert resolve_graph("auto", config, 0, gpu) is None
    assert resolve_graph(True, config, 0, gpu) is None
    assert resolve_graph(False, config, 0, gpu) == "graph=False was asked for"
    for device, sliding in ((CPU, 0), (gpu, 2)):
        with pytest.raises(UnsupportedModelError, match=r"^graph=True: (device cpu|2 sliding-window layers)"):
            resolve_graph(True, config, sliding, device)
    with pytest.raises(ValueError, match=r"^graph=yes: expected True, False or auto$"):
        resolve_graph("yes", config, 0, CPU)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 9])
def test_chunks_are_the_batch_cut_into_columns_each_with_the_mask_of_all_before(tokens: int) -> None:
    ids, positions, mask = left_padded([[7, 8, 9, 10, 11], [5, 6]], CPU)
    found = list(in_chunks(ids, positions, mask, tokens))
    assert torch.equal(torch.cat([chunk for chunk, _, _ in found], dim=1), ids)
    assert torch.equal(torch.cat([places for _, places, _ in found], dim=1), positions)
    for index, (chunk, _, seen) in enumerate(found):
        assert 1 <= chunk.shape[1] <= tokens
        assert torch.equal(seen, mask[:, : index * tokens + chunk.shape[1]])
    assert all(seen is None for _, _, seen in in_chunks(ids, positions, None, tokens))


@pytest.mark.parametrize("prompt", ["hello", ["a", "b"], [None]])
def test_text_in_place_of_token_ids_is_refused_in_one_line(prompt: object) -> None:
    """Once torch said: too many dimensions 'str'."""
    with pytest.raises(ValueError, match=r"^prompt 1: expected token ids, as a tokenizer gives; its first is a "):
        left_padded([[1, 2], prompt], CPU)
