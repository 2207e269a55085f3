"""KIVI's fused decode over layouts and dtypes on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kivi_steps import SHAPES, check_shape, check_storage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("name", SHAPES)
def test_the_executors_agree_on_every_layout(name: str) -> None:
    check_shape(SHAPES[name], "cuda")


def test_appended_tokens_are_stored_as_prefilled_ones() -> None:
    check_storage("cuda")
