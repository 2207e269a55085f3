"""Which modules of a model can run through fused kernels: recognised by their parts, checked on random input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ffd.fused_modules import (
    FusedLayer,
    FusedLinear,
    FusedMLP,
    FusedNorm,
    FusedRotary,
    SharedInput,
    is_linear,
    is_norm,
    is_swiglu_mlp,
)
from ffd.fusion import Fusion, Replacement, swapped
from ffd.kernels.weights import MAX_TOKENS

_ROTARY = "apply_rotary_pos_emb"  # a function of each modeling file of transformers, looked up at every call
_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_ATTENTION_PARTS = {*_PROJECTIONS, "o_proj"}
_ATTENTION_NORMS = {"q_norm", "k_norm"}


def fuse(model: Any, tokens: int) -> Fusion:
    """Recognise and check what can be fused in a model for steps of ``tokens`` tokens.

    Parameters
    ----------
    model
        A causal LM of transformers on the device where it will run.
    tokens
        Rows of the batch: tokens of one decode step.
    """
    fusion = Fusion()
    reason = _why_not_at_all(model, tokens)
    if reason is not None:
        fusion.refused["all"] = reason
        return fusion
    check = _Check(model, tokens)
    with torch.inference_mode():
        _fuse_rotary(model, fusion, check)
        for module in model.modules():
            if is_norm(module):
                norm = FusedNorm(module)
                fusion.accept("rms_norm", check.module(module, norm), _forward(module, norm))
        for module in model.modules():
            children = dict(module.named_children())
            if children.keys() == _LAYER_PARTS:
                _fuse_layer(module, children, fusion, check)
        head = model.get_output_embeddings()
        if is_linear(head):
            fused_head = FusedLinear(head)
            fusion.accept("lm_head", check.module(head, fused_head), _forward(head, fused_head))
    return fusion


def _why_not_at_all(model: Any, tokens: int) -> str | None:
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {model.dtype}: kernels are for 16-bit weights"
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens a step: kernels are for at most {MAX_TOKENS}"
    return None


def _forward(module: nn.Module, function: Callable[..., Any]) -> Replacement:
    return Replacement(module, "forward", function)


def _fuse_rotary(model: Any, fusion: Fusion, check: _Check) -> None:
    """The rotary function of the file that defines the model's attention."""
    attention = next((m for m in model.modules() if dict(m.named_children()).keys() >= _ATTENTION_PARTS), None)
    file = None if attention is None else sys.modules.get(type(attention).__module__)
    original = None if file is None else vars(file).get(_ROTARY)
    if attention is not None and original is not None:
        rotary = FusedRotary(original)
        fusion.accept("rotary", check.rotary(attention, rotary), Replacement(file, _ROTARY, rotary))


def _fuse_layer(layer: nn.Module, parts: dict[str, nn.Module], fusion: Fusion, check: _Check) -> None:
    """The projections and the MLP of a decoder layer and, where they are fused, its residual additions."""
    attention, mlp = parts["self_attn"], parts["mlp"]
    inner = dict(attention.named_children())
    output = None
    if inner.keys() - _ATTENTION_NORMS == _ATTENTION_PARTS and all(is_linear(inner[p]) for p in _ATTENTION_PARTS):
        shared = SharedInput([inner[name] for name in _PROJECTIONS])
        for index, name in enumerate(_PROJECTIONS):
            piece = shared.piece(index)
            fusion.accept("qkv", check.module(inner[name], piece), _forward(inner[name], piece))
        output = FusedLinear(inner["o_proj"])
        if not fusion.accept("o_proj", check.module(inner["o_proj"], output), _forward(inner["o_proj"], output)):
            output = None
    if not is_swiglu_mlp(mlp):
        fusion.accept("mlp", f"{type(mlp).__name__} is no SwiGLU of three linear layers")
        return
    fused_mlp = FusedMLP(mlp)
    if not fusion.accept("mlp", check.module(mlp, fused_mlp), _forward(mlp, fused_mlp)) or output is None:
        return
    fused_layer = FusedLayer(layer, output, fused_mlp)
    fusion.accept("residual", check.layer(layer, fused_layer, fusion), _forward(layer, fused_layer))


class _Check:
    """Runs replacements against their originals on random input."""

    def __init__(self, model: Any, tokens: int) -> None:
        self.tokens = tokens
        self.dtype = model.dtype
        self.device = model.device
        self._generator = torch.Generator(model.device).manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        """Normal, of the model's dtype."""
        return torch.randn(shape, generator=self._generator, device=self.device).to(self.dtype)

    def module(self, module: nn.Module, fused: Callable[[Tensor], Tensor]) -> str | None:
        """Reason to refuse a replacement of a module's forward, or None."""
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return f"{type(module).__name__} has hooks or a forward of its own"
        first = next(p for p in module.parameters())
        x = self.random(self.tokens, 1, first.shape[-1])
        return _difference(module.forward(x), fused(x), type(module).__name__)

    def rotary(self, attention: Any, fused: FusedRotary) -> str | None:
        """The same for the rotary function."""
        d = getattr(attention, "head_dim", 0)
        if not d:
            return f"{type(attention).__name__} has no head_dim"
        q, k = (self.random(self.tokens, 1, attention.get_submodule(p).out_features // d, d).transpose(1, 2)
                for p in ("q_proj", "k_proj"))  # fmt: skip
        cos, sin = self.random(self.tokens, 1, d), self.random(self.tokens, 1, d)
        if not fused.serves(q, k, cos):
            return f"head_dim {d} with {tuple(q.shape)} queries is not served"
        for want, got in zip(fused.original(q, k, cos, sin), fused(q, k, cos, sin), strict=True):
            reason = _difference(want, got, _ROTARY)
            if reason is not None:
                return reason
        return None

    def layer(self, layer: Any, fused: FusedLayer, fusion: Fusion) -> str | None:
        """The same for a decoder layer, with its projections in the place of attention, which needs a cache."""
        attention = layer.self_attn
        projections = [attention.get_submodule(name) for name in _PROJECTIONS]

        def stand_in(hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
            mixed = torch.cat([p(hidden_states) for p in projections], -1)
            return attention.o_proj(mixed[..., : attention.o_proj.in_features].contiguous()), None

        if "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
            return f"{type(layer).__name__} has hooks or a forward of its own"
        x = self.random(self.tokens, 1, attention.q_proj.in_features)
        with swapped([_forward(attention, stand_in)]):
            want = layer.forward(hidden_states=x)
            with fusion.active():
                got = fused(hidden_states=x)
        return _difference(want, got, type(layer).__name__)


def _difference(want: Any, got: Any, name: str) -> str | None:
    """Why two results are not the same up to rounding and the order of sums, or None."""
    if not isinstance(want, Tensor) or want.shape != got.shape or want.dtype != got.dtype:
        return f"{name} returns something else than its replacement"
    a, b = want.float(), got.float()
    if not bool(torch.isfinite(a).all()):
        return f"{name} is not finite on random input"
    step = torch.finfo(want.dtype).eps
    typical = a.square().mean().sqrt()
    error = (a - b).abs()
    if bool((error > 4 * step * a.abs() + 32 * step * typical).any()):
        return f"{name} differs from its replacement by {float(error.max()):.3g} where {float(typical):.3g} is typical"
    if float((a - b).square().mean().sqrt()) > 4 * step * float(typical):
        return f"{name} differs from its replacement by more than rounding"
    return None
