"""Work that a GPU does at the same time: a decode step of few rows leaves most of it idle."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")


def at_once(first: Callable[[], A], second: Callable[[], B], device: torch.device, lane: str) -> tuple[A, B]:
    """Launch two pieces of work that need nothing of each other, on two streams of a GPU; in order elsewhere.

    Each stream waits for the other where it takes over, so that neither reuses memory which the other still reads, and
    what is captured on the current stream captures both.

    Parameters
    ----------
    first, second
        The work; the second is launched on a stream of its own.
    device
        Where.
    lane
        Names that stream: work within such work needs another one.
    """
    if device.type != "cuda":
        return first(), second()
    here, side = torch.cuda.current_stream(device), _stream(device, lane)
    side.wait_stream(here)
    of_first = first()
    with torch.cuda.stream(side):
        of_second = second()
    here.wait_stream(side)
    return of_first, of_second


@cache
def _stream(device: torch.device, lane: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
