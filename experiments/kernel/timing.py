"""Time on the device: graph replay or eager launches, and the read bandwidth that floors are computed with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPLAYS = 25
_CALLS = 24
"""Least calls of one graph: starting a graph takes about 10 us."""


def duration(step: Callable[[], object], calls: int, timing: str) -> float:
    """Median time in us of one of the ``calls`` that ``step`` makes, timed as `grid.Mode` says."""
    if timing == "interpreted":
        start = time.perf_counter()
        step()
        return 1e6 * (time.perf_counter() - start) / calls
    rounds = -(-_CALLS // calls)

    def repeated() -> None:
        for _ in range(rounds):
            step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles, and allocates scratch memory
    torch.cuda.current_stream().wait_stream(stream)
    launch: Callable[[], object] = repeated
    if timing == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            repeated()
        launch = graph.replay
    for _ in range(3):
        launch()
    times = []
    for _ in range(REPLAYS):
        start_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start_event.record()
        launch()
        end_event.record()
        end_event.synchronize()
        times.append(start_event.elapsed_time(end_event) * 1e3 / (calls * rounds))
    return float(statistics.median(times))


def read_bandwidth(device: str = "cuda") -> float:
    """Bytes per us that a plain reduction reads from memory."""
    on_gpu = device == "cuda"
    data = torch.empty(2 << 30 if on_gpu else 16 << 20, dtype=torch.uint8, device=device).view(torch.int64)
    data.random_()
    return data.numel() * 8 / duration(lambda: data.amax(), 1, "graph" if on_gpu else "interpreted")


def cold_bytes() -> int:
    """What the layers of one graph must read together for each to find its data evicted: four times the L2 cache."""
    return 4 * torch.cuda.get_device_properties(0).L2_cache_size if torch.cuda.is_available() else 0
