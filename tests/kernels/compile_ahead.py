"""Compiles every kernel that a method's append and decode launch, for an H100-class GPU, without having one.

Usage: ``python -m tests.kernels.compile_ahead NAME[,KNOB=VALUE...] ...`` with names of methods; prints one line
per kernel.
The interpreter accepts programs that the compiler refuses, so it cannot replace this.
"""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import torch
import yaml

_SHARED_MEMORY = 227 << 10


def main(methods: list[str]) -> None:
    properties = types.SimpleNamespace(
        multi_processor_count=132, shared_memory_per_block_optin=_SHARED_MEMORY, major=9, minor=0
    )
    torch.cuda.get_device_properties = lambda device: properties  # type: ignore[assignment,return-value]
    from triton.runtime.jit import JITFunction

    JITFunction.run = compile_launch
    from ffd.methods import method_class
    from tests.method_harness import append, make_case, new_layer, prefill

    for name, *assignments in (method.split(",") for method in methods):
        given = {knob: yaml.safe_load(value) for knob, value in (a.split("=") for a in assignments)}
        shapes = ((4, 128, torch.bfloat16, 16384), (7, 64, torch.float16, 192), (3, 80, torch.float32, 192))
        for group, d, dtype, capacity in shapes:
            case = make_case(group=group, d=d)
            knobs = {"group_size": 16} if "group_size" in method_class(name)().knobs() and d == 80 else {}
            layer = new_layer(method_class(name).from_knobs({**knobs, **given}), case, "fused", capacity, dtype)
            layer.geometry = replace(layer.geometry, layer=1)  # a launch of an inner layer fetches ahead
            prefill(layer, case, [120])
            layer.decode(append(layer, case), case.scale)


def compile_launch(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **keywords: Any) -> None:
    """Stand in for a launch: infer the signature from the arguments and compile for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = {parameter.name for parameter in kernel.params}
    options = {key: keywords.pop(key) for key in list(keywords) if key not in known}
    given = {**dict(zip([p.name for p in kernel.params], args, strict=False)), **keywords}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes = {}
    for index, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = type_of(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    shared = compiled.metadata.shared
    if shared > _SHARED_MEMORY:
        raise RuntimeError(f"{kernel.fn.__name__} needs {shared} bytes of shared memory")
    print(f"{kernel.fn.__name__} shared={shared}", flush=True)


def type_of(value: Any) -> str:
    """Triton's name of an argument's type."""
    if isinstance(value, torch.Tensor):
        names = {
            torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32",
            torch.int64: "i64", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.bool: "i1",
        }  # fmt: skip
        return "*" + names[value.dtype]
    if isinstance(value, int):
        return "i32" if abs(value) < 2**31 else "i64"
    return "fp32"


if __name__ == "__main__":
    main(sys.argv[1:])
