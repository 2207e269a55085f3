"""Which of transformers' models can decode sparsely; every other is refused in one line that names its type.

A configuration says most of it (`require_supported`). Code that takes keys and values apart on their way to the
attention function shows only when it runs, and is refused there (`ffd.cache_layer`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ACCEPTED = (
    "accepted are decoder-only models whose layers are full or sliding-window attention over one key and one value "
    "per kv head, such as Llama, Qwen2, Qwen3 and Mistral"
)


class UnsupportedModelError(ValueError):
    """The model or the call uses a feature that sparse decoding does not implement; the message names it."""


class SettingError(UnsupportedModelError):
    """A setting of the engine is True, and what that demands cannot be had.

    Parameters
    ----------
    setting
        ``graph`` or ``fuse``.
    reason
        Why not, in a few words.
    """

    def __init__(self, setting: str, reason: str) -> None:
        super().__init__(f"{setting}=True: {reason}; expected auto or False")
        self.setting, self.reason = setting, reason


@dataclass(frozen=True)
class AttentionShape:
    """What a model's configuration says of its attention."""

    kinds: tuple[str, ...]
    """``full_attention`` or ``sliding_attention``, layer by layer."""
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    """Tokens that sliding-window layers attend to; 0 where there are none."""


def refused_model(model_type: str, why: str) -> UnsupportedModelError:
    """The error for a model that cannot be used."""
    return UnsupportedModelError(f"model type {model_type}: {why}; {ACCEPTED}")


def require_supported(config: Any) -> AttentionShape:
    """Read a transformers configuration, or say why sparse decoding cannot run the model.

    Parameters
    ----------
    config
        Of the whole model; its text decoder's part is used.

    Raises
    ------
    UnsupportedModelError
        For another architecture than `ACCEPTED` describes.
    """
    name = str(config.model_type)
    if config.is_encoder_decoder:
        raise refused_model(name, "an encoder-decoder model")
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:
        raise refused_model(name, "several text decoders in one configuration") from None
    # Encoders that can be turned into decoders, cross-attention included, say which they are.
    if getattr(text, "is_decoder", True) is False and hasattr(text, "add_cross_attention"):
        raise refused_model(name, "is_decoder=False, an encoder")
    for key, meaning in _OTHER_ATTENTION.items():
        if getattr(text, key, None):
            raise refused_model(name, f"{key}: {meaning}")
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * text.num_hidden_layers
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise refused_model(name, f"layer type {kind}")
    try:
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    except AttributeError as error:
        raise refused_model(name, f"its configuration has no {error.name}") from None
    except RuntimeError:  # what transformers raises for a key that each layer has for itself
        raise refused_model(name, "heads that differ from layer to layer") from None
    return AttentionShape(tuple(kinds), heads, kv_heads, head_dim, window or 0)


def require_one_device(model: Any) -> torch.device:
    """Where a model's weights are; raises `UnsupportedModelError` unless they are all in one place."""
    if len({p.device for p in model.parameters()}) > 1:
        raise UnsupportedModelError("model on several devices: load it on one device")
    device: torch.device = model.device
    if device.type == "meta":
        raise UnsupportedModelError("model on the meta device: its weights hold no numbers; load them first")
    return device


_OTHER_ATTENTION = {
    "num_kv_shared_layers": "layers that share keys and values",
    "cross_attention_layers": "layers that attend to another modality",
    "kv_lora_rank": "multi-head latent attention, whose keys and values differ in size",
}
