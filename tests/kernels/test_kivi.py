"""KIVI's fused decode over layouts and dtypes, interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

from ffd.kernels import kivi_decode
from tests.kivi_steps import SHAPES, check_shape


@pytest.mark.parametrize("name", SHAPES)
def test_the_executors_agree_on_every_layout(name: str) -> None:
    check_shape(SHAPES[name])


@pytest.mark.parametrize("name", ["default", "4 bits", "groups across fields"])
def test_codes_outlive_hardware_that_flushes_subnormals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes were subnormals whatever the device: where products take those for zero, all fell to their minimum."""
    product = interpreter.InterpreterBuilder.create_dot
    smallest = np.finfo(np.float16).smallest_normal

    def flushed(handle: Any) -> Any:
        data = np.where(np.abs(handle.data) < smallest, 0, handle.data).astype(handle.data.dtype)
        return interpreter.TensorHandle(data, handle.dtype) if data.dtype == np.float16 else handle

    def flushing(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(self, flushed(a), flushed(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", flushing)
    with pytest.raises(AssertionError, match="not close"):
        check_shape(SHAPES[name])  # the flushing is felt
    hardware = kivi_decode.hardware
    monkeypatch.setattr(kivi_decode, "hardware", lambda device: replace(hardware(device), subnormals=False))
    check_shape(SHAPES[name])
