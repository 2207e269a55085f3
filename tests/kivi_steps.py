"""KIVI's layouts, one of each kind its fused kernels treat differently; used interpreted and on a GPU alike."""

from __future__ import annotations

import torch

from ffd.methods import create
from tests.method_checks import check_executors
from tests.method_harness import make_case

Shape = tuple[int, int, int, int, torch.dtype]

SHAPES: dict[str, Shape] = {
    # bits, group_size, query heads a kv head, head_dim, dtype
    "default": (2, 32, 4, 128, torch.float16),
    "bf16": (2, 32, 4, 128, torch.bfloat16),
    "4 bits": (4, 32, 4, 128, torch.float16),
    "small head": (2, 32, 4, 64, torch.float16),
    "a field of several groups": (2, 16, 2, 256, torch.float16),
    "a field of several groups, 4 bits": (4, 16, 8, 128, torch.float16),
    "a field of several groups, fp32": (2, 16, 9, 256, torch.float32),
    "groups across fields": (2, 16, 3, 80, torch.float16),
    "groups across fields, seven heads": (2, 32, 7, 96, torch.float16),
    "group of 64": (2, 64, 1, 64, torch.bfloat16),
    "group of 128": (2, 128, 2, 128, torch.float16),
    "one group a row, 4 bits": (4, 128, 1, 128, torch.float32),
}
# Outputs are of order 1; in 16 bits both executors round theirs once.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check_shape(shape: Shape, device: str = "cpu") -> None:
    """Rows without a quantised token, with some and with more, and one that ends in a whole buffer of keys."""
    bits, group_size, group, d, dtype = shape
    method = create("kivi", {"bits": bits, "group_size": group_size, "residual_length": group_size})
    case = make_case(batch=4, group=group, d=d, seed=3).to(device)
    lengths = (group_size, 128, 150, 191)
    check_executors(method, case, TOLERANCE[dtype], lengths, dtype=dtype)
