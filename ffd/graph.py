"""Capture of one decode step in a CUDA graph, replayed for every length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ffd.support import SettingError

_WARM_UPS = 2  # compiles kernels and lets cuBLAS allocate its workspaces outside the capture

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # transformers reads the positions on the host for these


def why_not_capturable(config: Any, sliding_layers: int, device: torch.device) -> str | None:
    """Reason why a model's decode step cannot be captured, or None if it can.

    Parameters
    ----------
    config
        The model's text configuration.
    sliding_layers
        Number of sliding-window layers: their stock cache grows by concatenation.
    device
        Where the model runs.
    """
    reason = without_graphs(device)
    if reason is not None:
        return reason
    if sliding_layers:
        return f"{sliding_layers} sliding-window layers use a growing cache"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type")
    if kind in _LENGTH_DEPENDENT_ROPE:
        return f"rope type {kind} depends on the length on the host"
    return None


def without_graphs(device: torch.device) -> str | None:
    """Reason why no step can be captured on a device, or None."""
    return None if device.type == "cuda" else f"device {device.type} has no CUDA graphs"


def resolve_graph(requested: bool | str, config: Any, sliding_layers: int, device: torch.device) -> str | None:
    """Reason why a model's decode steps are run eagerly, or None where they are captured.

    Parameters
    ----------
    requested
        ``auto`` captures wherever it can; True raises where it cannot; False never captures.
    config, sliding_layers, device
        See `why_not_capturable`.

    Raises
    ------
    ValueError
        For another request.
    SettingError
        For True where steps cannot be captured, with the reason.
    """
    if not isinstance(requested, bool) and requested != "auto":
        raise ValueError(f"graph={requested}: expected True, False or auto")
    obstacle = why_not_capturable(config, sliding_layers, device)
    if requested is True and obstacle is not None:
        raise SettingError("graph", obstacle)
    if requested is False and obstacle is None:
        return "graph=False was asked for"
    return obstacle


class CapturedStep:
    """A captured decode step.

    Parameters
    ----------
    step
        Runs one step on static tensors without reading anything back. It is run a few times before
        the capture, so the caller's state must be disposable.
    """

    def __init__(self, step: Callable[[], None]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            step()

    def replay(self) -> None:
        """Run the captured step on the current contents of its tensors."""
        self._graph.replay()
