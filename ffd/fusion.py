"""Fused kernels in place of a model's small modules, while the engine's own decode step runs.

No model is forked. Modules are recognised by their parts, each replacement is run against the original on random
input and refused where the two differ by more than rounding (`ffd/fused_model.py`), and the originals are back as
soon as the step is over: prefill, stock ``generate`` and an attached model never meet a replacement, nor do other
threads while it runs (`ffd/replacement.py`). Under a captured graph the step's Python runs once, so that putting
replacements in place and back costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ffd.replacement import Replacement, swapped
from ffd.support import SettingError

if TYPE_CHECKING:
    import torch

ALL = "all"
"""In place of a kind of module: every one of the model's."""


@dataclass
class Fusion:
    """What was recognised in a model and passed its check, ready to be put in place."""

    replacements: list[Replacement] = field(default_factory=list)
    fused: list[str] = field(default_factory=list)
    """Kinds of modules with a replacement, in the order of their first appearance."""
    refused: dict[str, str] = field(default_factory=dict)
    """Kinds of modules of which one or more kept the original, with the reason."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replacements in place for the thread that runs the step, and everything as it was afterwards."""
        with swapped(self.replacements):
            yield

    def accept(self, kind: str, reason: str | None, *replacements: Replacement) -> bool:
        """Note the outcome of a check; True where the replacements are taken.

        What has a replacement keeps it: of a module that two layers share, each would put its own state in the other's.
        """
        taken = {(id(r.owner), r.name) for r in self.replacements}
        if reason is None and any((id(r.owner), r.name) in taken for r in replacements):
            reason = f"{type(replacements[0].owner).__name__} is shared by layers: the first one's replacement serves"
        if reason is not None:
            self.refused.setdefault(kind, reason)
            return False
        self.replacements.extend(replacements)
        if kind not in self.fused:
            self.fused.append(kind)
        return True


def why_not_fusable(device: torch.device, dtype: torch.dtype, tokens: int) -> str | None:
    """Reason why no module of any model can be fused, or None; known before a model is loaded.

    Parameters
    ----------
    device, dtype
        Where a model would run, and of its weights.
    tokens
        Rows of the batch: tokens of one decode step.
    """
    reason = without_gpu(device)
    if reason is not None:
        return reason
    from ffd.fused_model import outside_kernels

    return outside_kernels(dtype, tokens)


def without_gpu(device: torch.device, *, demanded: bool = True) -> str | None:
    """Reason why kernels cannot run on a device, or None; interpreted ones are for tests, which demand them."""
    if device.type == "cuda" or (demanded and os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    return f"device {device.type}: kernels need a GPU"


def resolve_fusion(requested: bool | str, model: Any, tokens: int) -> Fusion:
    """What to fuse in a model.

    Parameters
    ----------
    requested
        ``auto`` fuses on a GPU whatever can be; True raises where anything cannot; False fuses nothing.
    model
        A causal LM of transformers on the device where it will run.
    tokens
        Rows of the batch: tokens of one decode step.

    Raises
    ------
    SettingError
        For True where a module keeps its original, with the reason.
    """
    if not isinstance(requested, bool) and requested != "auto":
        raise ValueError(f"fuse={requested}: expected True, False or auto")
    if requested is False:
        return Fusion(refused={ALL: "fuse=False was asked for"})
    reason = without_gpu(model.device, demanded=requested is True)
    if reason is None:
        from ffd.fused_model import fuse

        fusion = fuse(model, tokens)
    else:
        fusion = Fusion(refused={ALL: reason})
    if requested is True and fusion.refused:
        kind, reason = next(iter(fusion.refused.items()))
        raise SettingError("fuse", reason if kind == ALL else f"{kind}: {reason}")
    return fusion
