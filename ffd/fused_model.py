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
from ffd.fusion import ALL, Fusion
from ffd.kernels.weights import MAX_TOKENS
from ffd.replacement import Replacement, standing

_ROTARY = "apply_rotary_pos_emb"  # a function of each modeling file of transformers, looked up at every call
_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_ATTENTION_PARTS = {*_PROJECTIONS, "o_proj"}
_ATTENTION_NORMS = {"q_norm", "k_norm"}
_NO_LINEAR = "is no plain 16-bit linear layer of a multiple of 16 columns"


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
    reason = outside_kernels(model.dtype, tokens) or _compiled(model)
    if reason is not None:
        fusion.refused[ALL] = reason
        return fusion
    check = _Check(model, tokens)
    with torch.inference_mode():
        _fuse_rotary(model, fusion, check)
        for module in model.modules():
            if is_norm(module):
                norm = FusedNorm(module)
                fusion.accept("rms_norm", check.module(module, norm), _forward(module, norm))
        layers = [m for m in model.modules() if dict(m.named_children()).keys() == _LAYER_PARTS]
        if not layers:
            fusion.refused["layers"] = f"{type(model).__name__} has no decoder layers made of {sorted(_LAYER_PARTS)}"
        for layer in layers:
            _fuse_layer(layer, dict(layer.named_children()), fusion, check)
        head = model.get_output_embeddings()
        if is_linear(head):
            fused_head = FusedLinear(head)
            fusion.accept("lm_head", check.module(head, fused_head), _forward(head, fused_head))
        else:
            fusion.accept("lm_head", f"{type(head).__name__} {_NO_LINEAR}")
    return fusion


def outside_kernels(dtype: torch.dtype, tokens: int) -> str | None:
    """Reason why the kernels are not for such weights or steps, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {dtype}: kernels are for 16-bit weights"
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens a step: kernels are for at most {MAX_TOKENS}"
    return None


def _compiled(model: Any) -> str | None:
    if any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in model.modules()):
        return "torch.compile: a compiled graph has the model's own modules in it"
    return None


def _forward(module: nn.Module, function: Callable[..., Any]) -> Replacement:
    return Replacement(module, "forward", function)


def _fuse_rotary(model: Any, fusion: Fusion, check: _Check) -> None:
    """The rotary function of the file that defines the model's attention."""
    attention = next((m for m in model.modules() if dict(m.named_children()).keys() >= _ATTENTION_PARTS), None)
    file = None if attention is None else sys.modules.get(type(attention).__module__)
    original = None if file is None else standing(file, _ROTARY)
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
    else:
        fusion.accept("qkv", f"a projection of {type(attention).__name__} {_NO_LINEAR}")
    if not is_swiglu_mlp(mlp):
        fusion.accept("mlp", f"{type(mlp).__name__} is no SwiGLU of three plain 16-bit linear layers")
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
        reason = _altered(module)
        if reason is not None:
            return reason
        first = next(p for p in module.parameters())
        x = self.random(self.tokens, 1, first.shape[-1])
        want = _own(module, x)
        return want if isinstance(want, str) else _difference(want, fused(x), type(module).__name__)

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
        """The same for a decoder layer, whose attention has one token to attend to."""
        reason = _altered(layer)
        if reason is not None:
            return reason
        attention = layer.self_attn
        x = self.random(self.tokens, 1, attention.q_proj.in_features)
        angles = self.random(2, self.tokens, 1, getattr(attention, "head_dim", 0)).unbind()
        want = _own(layer, hidden_states=x, position_embeddings=angles, attention_mask=None)
        if isinstance(want, str):
            return want
        with fusion.active():
            got = fused(hidden_states=x, position_embeddings=angles, attention_mask=None)
        return _difference(want, got, type(layer).__name__)


def _altered(module: nn.Module) -> str | None:
    """Why a module may do more than its class says, its parts included: they are not called any more."""
    for part in module.modules():
        if standing(part, "forward") is not None or part._forward_hooks or part._forward_pre_hooks:
            return f"{type(part).__name__} has hooks or a forward of its own"
    return None


def _own(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a module makes of such input, or the reason, a string, why it takes none."""
    try:
        return module.forward(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        what = (str(error).splitlines() or [""])[0]
        return f"{type(module).__name__} does not take such input ({type(error).__name__}: {what})"


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
