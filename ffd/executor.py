"""Which code decodes: the fused Triton kernels or the fp32 reference."""

from __future__ import annotations

import os

import torch

from ffd.methods import Executor


class ExecutorError(ValueError):
    """The executor asked for is unknown or cannot run here."""


def resolve_executor(requested: str, device: torch.device) -> Executor:
    """Turn ``auto`` into what the device can run.

    Parameters
    ----------
    requested
        ``auto`` (fused on a GPU, else reference), ``fused`` or ``reference``.
    device
        Where the cache lives.

    Raises
    ------
    ExecutorError
        For another name, or for ``fused`` where Triton cannot run: never a silent fallback.
    """
    if requested not in ("auto", "fused", "reference"):
        raise ExecutorError(f"executor={requested}: expected auto, fused or reference")
    if requested == "auto":
        return "fused" if device.type == "cuda" else "reference"
    if requested == "fused" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ExecutorError(
            f"executor=fused: needs a GPU (device is {device.type}), or TRITON_INTERPRET=1 for tests; "
            "use executor=reference or auto"
        )
    return "fused" if requested == "fused" else "reference"
