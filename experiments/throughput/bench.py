"""What all rows of a record share: the model, its device and how memory and floors are read."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch

from experiments.throughput.cases import Case
from experiments.throughput.row import weight_bytes


@dataclass(frozen=True)
class Bench:
    """A model to time steps of."""

    model: Any
    """A causal LM in eval mode."""
    device_name: str
    """Of the GPU, or cpu."""
    bandwidth: float
    """Measured read bandwidth, bytes a second."""
    executor: str = "auto"
    graph: bool | str = "auto"
    prefill_chunk: int | None = None
    """Most prompt tokens per forward; None for whole prompts."""

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on a GPU."""
        return bool(self.model.device.type == "cuda")

    def point(self, case: Case) -> dict[str, Any]:
        """The fields that name a row."""
        named = {"device": self.device_name, "protocol": case.protocol, "method": case.method.label}
        return {**named, "B": case.B, "T": case.T, "kept_target": case.kept, "fuse": case.fuse}

    def speed(self, case: Case, milliseconds: float, cache_bytes: float) -> dict[str, Any]:
        """A step's time beside its floor; ``cache_bytes`` are those that it must read of the cache."""
        size = weight_bytes(self.model) + cache_bytes
        floor = 1e3 * size / self.bandwidth
        return {
            "ms_per_step": milliseconds,
            "tokens_per_second": 1e3 * case.B / milliseconds,
            "bytes": size,
            "floor_ms": floor,
            "over_floor": milliseconds / floor,
        }

    def begin_memory(self) -> int | None:
        """GPU memory in use; its peak is counted from here on."""
        if not self.on_gpu:
            return None
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.model.device)
        return torch.cuda.memory_allocated(self.model.device)

    def peak_memory(self) -> int | None:
        """Most GPU memory in use since `begin_memory`."""
        return torch.cuda.max_memory_allocated(self.model.device) if self.on_gpu else None

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize(self.model.device)

    def release(self) -> None:
        """Give memory back before the next row: engines hold on to themselves in circles."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
