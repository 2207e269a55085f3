"""Forward functions that run a model's small modules through fused kernels, and how those modules are recognised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ffd.kernels.linear import linear
from ffd.kernels.rms_norm import rms_norm
from ffd.kernels.rotary import rotary
from ffd.kernels.swiglu_mlp import swiglu

_SILU = (nn.SiLU, type(ACT2FN["silu"]))


def is_plain(weight: Any) -> bool:
    """Numbers in memory, not a subclass of Tensor that stands for them: quantised weights may be such."""
    return type(weight) in (Tensor, nn.Parameter)


def is_linear(module: Any) -> bool:
    """A plain linear layer, not a subclass that computes something else, with weights as the kernels read them."""
    return (
        type(module) is nn.Linear
        and is_plain(module.weight)
        and module.weight.dtype in (torch.bfloat16, torch.float16)
        and module.weight.is_contiguous()
        and module.weight.data_ptr() % 16 == 0
        and module.in_features % 16 == 0
        and not getattr(module, "parametrizations", None)
    )


def is_norm(module: nn.Module) -> bool:
    """An RMSNorm as Llama's: one weight of one dimension and an epsilon."""
    parameters = dict(module.named_parameters())
    return (
        parameters.keys() == {"weight"}
        and is_plain(parameters["weight"])
        and parameters["weight"].ndim == 1
        and isinstance(getattr(module, "variance_epsilon", None), float)
    )


def is_swiglu_mlp(module: Any) -> bool:
    """Three linear layers and SiLU with the names of Llama's; what is done with them is for the check to say.

    The activation goes by its type: random input does not reach the limits that others set to large values.
    """
    parts = dict(module.named_children())
    names = ("gate_proj", "up_proj", "down_proj")
    if parts.keys() != {*names, "act_fn"} or type(parts["act_fn"]) not in _SILU:
        return False
    if not all(is_linear(parts[n]) for n in names):
        return False
    return (module.gate_proj.bias is None) == (module.up_proj.bias is None)


class FusedNorm:
    """Forward of an RMSNorm."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        return rms_norm(hidden_states, self.module.weight, self.module.variance_epsilon)


class FusedLinear:
    """Forward of a linear layer."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.residual: Tensor | None = None
        """Added to the output of the next call alone."""

    def __call__(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        residual, self.residual = self.residual, None
        bias = self.module.bias
        (out,) = linear(input, [self.module.weight], None if bias is None else [bias], residual)
        return out


class SharedInput:
    """Linear layers that a model calls one after the other on the same tensor: the first call computes all."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = list(modules)
        self._input: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def piece(self, index: int) -> Callable[[Tensor], Tensor]:
        """Forward of one of the layers."""

        def forward(input: Tensor) -> Tensor:
            if input is not self._input or index not in self._waiting:
                self._input, self._waiting = input, dict(enumerate(self._compute(input)))
            out = self._waiting.pop(index)
            if not self._waiting:
                self._input = None
            return out

        return forward

    def _compute(self, x: Tensor) -> list[Tensor]:
        biases = [m.bias for m in self.modules]
        if len({b is None for b in biases}) == 2:  # some with, some without
            return [linear(x, [m.weight], None if m.bias is None else [m.bias])[0] for m in self.modules]
        return linear(x, [m.weight for m in self.modules], None if biases[0] is None else biases)


class FusedMLP:
    """Forward of a SwiGLU MLP."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.down = FusedLinear(module.down_proj)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., K]."""
        gate, up = self.module.gate_proj, self.module.up_proj
        return self.down(swiglu(x, gate.weight, up.weight, gate.bias, up.bias))


class FusedRotary:
    """Stands in for transformers' function of queries, keys and angles."""

    def __init__(self, original: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.original = original

    @staticmethod
    def serves(q: Tensor, k: Tensor, cos: Tensor) -> bool:
        """One token a row, all channels rotated."""
        return (
            q.ndim == 4 and q.shape[2] == 1 and cos.ndim == 3 and cos.shape[1] == 1
            and cos.shape[-1] == q.shape[-1] == k.shape[-1] and q.shape[-1] % 2 == 0
            and q.stride(-1) == k.stride(-1) == 1 and cos.dtype == q.dtype == k.dtype
        )  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[B, Hq, 1, d] and [B, Hkv, 1, d], rotated."""
        if args or kwargs or not self.serves(q, k, cos):
            return self.original(q, k, cos, sin, *args, **kwargs)
        return rotary(q, k, cos, sin)


class FusedLayer:
    """Forward of a pre-norm decoder layer: the residual additions ride with the projections before them."""

    def __init__(self, module: Any, attention_output: FusedLinear, mlp: FusedMLP) -> None:
        self.module = module
        self.attention_output = attention_output
        self.mlp = mlp

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """[B, 1, C] -> [B, 1, C]; the other arguments are the attention's."""
        m = self.module
        self.attention_output.residual = hidden_states
        hidden_states, _ = m.self_attn(hidden_states=m.input_layernorm(hidden_states), **kwargs)
        self.mlp.down.residual = hidden_states
        return m.mlp(m.post_attention_layernorm(hidden_states))
