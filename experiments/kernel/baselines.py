"""Dense attention by others' kernels, re-timed in every run: SDPA's flash and cuDNN backends, and flashinfer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.kernel.source import Step

STEP = "attend reduce"
"""What their step contains: the token must have been appended before."""


@dataclass(frozen=True)
class Library:
    """A dense kernel of others."""

    attend: Callable[[Step], Tensor]
    """One step's output, [B, Hq, d]."""
    context: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)
    """Entered once around many calls."""

    def run(self, steps: Sequence[Step]) -> Callable[[], None]:
        """Call it for each step in turn."""

        def step() -> None:
            with self.context():
                for inputs in steps:
                    self.attend(inputs)

        return step

    def outputs(self, steps: Sequence[Step]) -> list[Tensor]:
        """Results of each step."""
        with self.context():
            return [self.attend(inputs) for inputs in steps]


def libraries(batch_size: int) -> Mapping[str, Library | str]:
    """By name, the kernel or the reason why there is none here."""
    if not torch.cuda.is_available():
        return dict.fromkeys(("sdpa_flash", "sdpa_cudnn", "flashinfer"), "needs a GPU")
    return {
        "sdpa_flash": Library(_sdpa, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
        "sdpa_cudnn": Library(_sdpa, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
        "flashinfer": _flashinfer(batch_size),
    }


def copies(steps: Sequence[Step], count: int) -> list[Step]:
    """``count`` steps at addresses of their own, with the given ones' content in turn."""
    chosen = [steps[i % len(steps)] for i in range(count)]
    return [Step(s.q.clone(), s.keys.contiguous().clone(), s.values.contiguous().clone(), s.scale) for s in chosen]


def _sdpa(step: Step) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        step.q[:, :, None], step.keys, step.values, scale=step.scale, enable_gqa=True
    ).squeeze(2)


def _flashinfer(batch_size: int) -> Library | str:
    if importlib.util.find_spec("flashinfer") is None:
        return "not installed"
    if batch_size > 1:
        return "its kernel for single requests is timed at B=1 only"
    from flashinfer.decode import single_decode_with_kv_cache

    def attend(step: Step) -> Tensor:
        return single_decode_with_kv_cache(
            step.q[0], step.keys[0], step.values[0], kv_layout="HND", use_tensor_cores=True, sm_scale=step.scale
        )[None]

    return Library(attend)
