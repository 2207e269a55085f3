"""Compiles the kernels of fused modules for an H100-class GPU, without having one.

Usage: ``python -m tests.kernels.compile_fused``.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from tests.kernels.compile_ahead import compile_launch


def main() -> None:
    """The shapes of Llama-3.1-8B and, for masked loads and a bias, of Qwen2.5-0.5B."""
    properties = types.SimpleNamespace(
        multi_processor_count=132, shared_memory_per_block_optin=227 << 10, major=9, minor=0
    )
    torch.cuda.get_device_properties = lambda device: properties  # type: ignore[assignment,return-value]
    from triton.runtime.jit import JITFunction

    JITFunction.run = compile_launch
    from ffd.greedy import GreedyState
    from ffd.kernels.linear import linear
    from ffd.kernels.rms_norm import rms_norm
    from ffd.kernels.rotary import rotary
    from ffd.kernels.swiglu_mlp import swiglu

    def empty(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.bfloat16)

    x, weight = empty(2, 1, 4096), empty(4096, 4096)
    linear(x, [weight, empty(1024, 4096), empty(1024, 4096)])
    linear(x, [weight], residual=x)
    linear(empty(16, 1, 896), [empty(896, 896), empty(100, 896)], [empty(896), empty(100)])
    swiglu(x, empty(14336, 4096), empty(14336, 4096))
    swiglu(empty(16, 1, 896), empty(4864, 896), empty(4864, 896))
    rms_norm(x, empty(4096), 1e-5)
    rotary(
        empty(2, 1, 32, 128).transpose(1, 2), empty(2, 1, 8, 128).transpose(1, 2), empty(1, 1, 128), empty(1, 1, 128)
    )
    GreedyState(2, 100, torch.device("cpu"), fused=True).choose(empty(2, 128256), torch.ones(2, dtype=torch.int32))


if __name__ == "__main__":
    main()
