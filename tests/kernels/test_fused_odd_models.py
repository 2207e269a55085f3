"""Fusing models that someone changed: hooks, forwards of their own, shared modules, other kinds of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ffd
from ffd.cache import UnsupportedModelError
from ffd.fused_model import fuse
from ffd.fused_modules import is_linear
from ffd.fusion import Fusion, resolve_fusion
from ffd.methods import create
from tests.tiny import random_prompt, tiny_model


def _logits(model: Any, fusion: Fusion) -> Tensor:
    """Logits of a few decode steps."""
    engine = ffd.Engine(model, create("dense"), capacity=40, fuse=False, executor="reference")
    engine._fusion = fusion
    seen: list[Tensor] = []
    choose = engine._choose
    engine._choose = lambda x: (seen.append(x.float()), choose(x))[1]
    engine.generate([random_prompt(20)], 4)
    return torch.stack(seen)


def _halved(attention: Any) -> None:
    own = attention.forward
    attention.forward = lambda *args, **kwargs: (own(*args, **kwargs)[0] * 0.5, None)


def _halved_by_class(attention: Any) -> None:
    class Halved(type(attention)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)[0] * 0.5, None

    attention.__class__ = Halved


def _share(layers: Any, part: str) -> None:
    parent, _, name = part.rpartition(".")
    setattr(layers[1].get_submodule(parent), name, layers[0].get_submodule(part))


_ODD: dict[str, tuple[Callable[[Any], object], str | None]] = {
    "attention halved by a forward of its own": (lambda layers: _halved(layers[0].self_attn), "residual"),
    "attention halved by its class": (lambda layers: _halved_by_class(layers[0].self_attn), "residual"),
    "a forward of its own inside the MLP": (
        lambda layers: setattr(layers[0].mlp.gate_proj, "forward", lambda x: 0.1 * x),
        "mlp",
    ),
    "an MLP that two layers share": (lambda layers: _share(layers, "mlp"), "mlp"),
    "an o_proj that two layers share": (lambda layers: _share(layers, "self_attn.o_proj"), "o_proj"),
    "a q_proj that two layers share": (lambda layers: _share(layers, "self_attn.q_proj"), "qkv"),
    "a norm used twice": (
        lambda layers: setattr(layers[0], "post_attention_layernorm", layers[0].input_layernorm),
        None,
    ),
}


@pytest.mark.parametrize("name", _ODD)
def test_a_model_that_was_taken_apart_computes_what_its_own_modules_do(name: str) -> None:
    # The residual rode with the o_proj of a halved attention and was halved too; a module that two layers
    # share left the model with a KeyError.
    model = tiny_model("llama").half()
    change, refused = _ODD[name]
    change(model.model.layers)
    before = {module for module in model.modules() if "forward" in vars(module)}
    fusion = fuse(model, 1)
    assert fusion.replacements
    assert (refused in fusion.refused) if refused else not fusion.refused
    own, fused = _logits(model, Fusion()), _logits(model, fusion)
    torch.testing.assert_close(fused, own, rtol=0.02, atol=0.02 * float(own.abs().max()))
    assert {module for module in model.modules() if "forward" in vars(module)} == before


@pytest.mark.parametrize(("part", "refused"), [("mlp.gate_proj", "mlp"), ("self_attn", "residual")])
def test_hooks_see_what_they_see_without_replacements(part: str, refused: str) -> None:
    # Those of an MLP's parts were not called, and those of attention were shown its output with the residual.
    model = tiny_model("llama").half()
    seen: list[float] = []
    module = model.model.layers[0].get_submodule(part)
    module.register_forward_hook(lambda m, i, out: seen.append(float((out[0] if len(out) == 2 else out).norm())))
    fusion = fuse(model, 1)
    assert fusion.refused.keys() == {refused}
    own, fused = ((seen.clear(), _logits(model, f), list(seen))[2] for f in (Fusion(), fusion))
    assert own
    assert fused == pytest.approx(own, rel=0.02)


class _Quantised(Tensor):
    """Stands for numbers that it stores otherwise, as torchao's weights do."""

    @staticmethod
    def __new__(cls, weight: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


def test_weights_that_are_no_numbers_in_memory_are_left_alone() -> None:
    # Asking one for its address is an error, or gives zero, which 16 divides.
    model = tiny_model("llama").half()
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight = torch.nn.Parameter(_Quantised(projection.weight.data), requires_grad=False)
    assert not is_linear(projection)
    with pytest.raises(UnsupportedModelError, match=r"^fuse=True: qkv: a projection of LlamaAttention is no plain"):
        resolve_fusion(True, model, 1)


def test_a_compiled_model_keeps_its_modules() -> None:
    model = tiny_model("llama").half()
    model.model.layers[0].mlp.compile(backend="eager")
    assert fuse(model, 1).refused == {"all": "torch.compile: a compiled graph has the model's own modules in it"}
