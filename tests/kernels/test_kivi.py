"""KIVI's fused decode over layouts and dtypes, interpreted."""

from __future__ import annotations

import pytest

from tests.kivi_steps import SHAPES, check_shape


@pytest.mark.parametrize("name", SHAPES)
def test_the_executors_agree_on_every_layout(name: str) -> None:
    check_shape(SHAPES[name])
