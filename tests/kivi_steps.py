"""KIVI's layouts, one of each kind its fused kernels treat differently, and its storage; interpreted and on a GPU."""

from __future__ import annotations

import torch

from ffd.methods import create
from tests.method_checks import check_executors
from tests.method_harness import Case, append, make_case, new_layer, prefill

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


def check_storage(device: str = "cpu") -> None:
    """Tokens appended over several groups leave, bit for bit, what a prefill of them stores."""
    residual = 32
    case = make_case(batch=2, d=128, tokens=131, seed=3).to(device)
    case = Case(case.keys.exp(), case.values.exp(), case.queries)  # many steps lie half-way between two of fp16
    method = create("kivi", {"bits": 4, "residual_length": residual})
    grown, whole = (new_layer(method, case, "fused", 131, torch.float16) for _ in range(2))
    prefill(grown, case, [1, 31])
    for _ in range(100):
        append(grown, case)
    prefill(whole, case, [101, 131])
    for row, (keys, values) in enumerate(((96, 68), (128, 98))):
        held = {
            "key_codes": (row, slice(None), slice(keys)),
            "key_minimum": (row, slice(None), slice(keys // method.group_size)),  # type: ignore[attr-defined]
            "key_step": (row, slice(None), slice(keys // method.group_size)),  # type: ignore[attr-defined]
            "key_buffer": (row, slice(None), slice((101, 131)[row] - keys)),
            "value_codes": (row, slice(None), slice(values)),
            "value_minimum": (row, slice(None), slice(None), slice(values)),
            "value_step": (row, slice(None), slice(None), slice(values)),
            "value_window": (row,),
        }
        for name, part in held.items():
            assert torch.equal(getattr(grown, name)[part], getattr(whole, name)[part]), f"row {row}: {name}"
