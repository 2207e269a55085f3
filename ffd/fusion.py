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
from typing import Any

from ffd.cache import UnsupportedModelError
from ffd.replacement import Replacement, swapped


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
    UnsupportedModelError
        For True where a module keeps its original, with the reason.
    """
    if not isinstance(requested, bool) and requested != "auto":
        raise ValueError(f"fuse={requested}: expected True, False or auto")
    if requested is False:
        return Fusion(refused={"all": "fuse=False was asked for"})
    runs = model.device.type == "cuda" or (requested is True and os.environ.get("TRITON_INTERPRET") == "1")
    if runs:
        from ffd.fused_model import fuse

        fusion = fuse(model, tokens)
    else:
        fusion = Fusion(refused={"all": f"device {model.device.type}: kernels need a GPU"})
    if requested is True and fusion.refused:
        kind, reason = next(iter(fusion.refused.items()))
        raise UnsupportedModelError(f"fuse=True: {kind}: {reason}")
    return fusion
