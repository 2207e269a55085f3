"""Queries, keys and values of the timed steps: planted, so that the kept fraction is an input, or captured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from experiments.kernel.grid import BLOCK, Shape, whole_blocks

HOT_NATS = 12.0
"""Score of planted tokens; others stay within about 2 nats of zero."""


@dataclass(frozen=True, eq=False)
class Step:
    """One layer's inputs at one decode step."""

    q: Tensor
    """[B, Hq, d]."""
    keys: Tensor
    """[B, Hkv, T, d], the current token last."""
    values: Tensor
    """[B, Hkv, T, d]."""
    scale: float
    """Softmax scale."""


class Planting:
    """Random keys of one shape into which hot blocks are planted, whatever the kept fraction.

    Parameters
    ----------
    shape
        What is timed.
    device
        Where the tensors live.
    seed
        Of everything that is drawn.
    """

    def __init__(self, shape: Shape, device: str, seed: int = 0) -> None:
        s = self.shape = shape
        self.generator = torch.Generator(device).manual_seed(seed + s.T)

        def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(*size, generator=self.generator, device=device, dtype=dtype)

        self.q = normal(s.B, s.Hq, s.d).to(s.torch_dtype)
        grouped = self.q.float().unflatten(1, (s.Hkv, -1))
        # The shortest key that every head of the group scores HOT_NATS.
        target = torch.full((*grouped.shape[:3], 1), HOT_NATS * s.d**0.5, device=device)
        self.hot_key = (torch.linalg.pinv(grouped) @ target).squeeze(-1)
        self.cold_keys = normal(s.B, s.Hkv, s.T, s.d).mul_(0.3)
        self.values = normal(s.B, s.Hkv, s.T, s.d, dtype=s.torch_dtype)
        self._last: tuple[float, Step] | None = None

    def step(self, kept: float) -> Step:
        """Inputs whose hot blocks and tail are about ``kept`` of the tokens; the last ones made are remembered.

        The first block is always hot: it sets the pseudo-maximum. So is the tail, which FFD always keeps: what
        selects by scores alone shall find the same tokens. Numbers of hot blocks differ by at most one between kv
        heads, so that their mean meets the target.
        """
        if self._last is None or self._last[0] != kept:
            self._last = kept, self._planted(kept)
        return self._last[1]

    def _planted(self, kept: float) -> Step:
        s = self.shape
        blocks, tail = whole_blocks(s.T)
        heads = s.B * s.Hkv
        wanted = (kept * s.T - tail) / BLOCK
        total = round(min(max(wanted, 1), blocks) * heads)
        keys = self.cold_keys.clone()
        keys[:, :, blocks * BLOCK :] += self.hot_key[:, :, None]
        view = keys[:, :, : blocks * BLOCK].view(s.B, s.Hkv, blocks, BLOCK, s.d)
        for index in range(heads):
            row, head = divmod(index, s.Hkv)
            hot = total // heads + (index < total % heads)
            order = 1 + torch.randperm(blocks - 1, generator=self.generator, device=keys.device)
            chosen = torch.cat([order.new_zeros(1), order[: hot - 1]])
            view[row, head, chosen] += self.hot_key[row, head]
        return Step(self.q, keys.to(s.torch_dtype), self.values, s.d**-0.5)


def captured(path: Path, device: str) -> Iterator[tuple[Shape, list[Step]]]:
    """The last recorded step of every row of a trace, all recorded layers together; 32-bit ones become bfloat16.

    Parameters
    ----------
    path
        A trace file written by ``runner=fidelity trace=record``.
    device
        Where the tensors go.

    Raises
    ------
    ValueError
        If the file is damaged or no trace.
    """
    from eval.fidelity.traces import Trace

    trace = Trace.load(path, device)

    def narrow(x: Tensor) -> Tensor:
        return x.bfloat16() if x.dtype == torch.float32 else x

    for row in range(trace.lengths.shape[1]):
        steps = trace.active[:, row].nonzero().flatten().tolist()
        if not steps:
            continue
        last, length = steps[-1], int(trace.lengths[steps[-1], row])
        found = [
            Step(
                narrow(trace.queries[layer][last, row : row + 1]),
                narrow(keys[row : row + 1, :, :length]),
                narrow(trace.values.get(layer, keys)[row : row + 1, :, :length]),
                trace.scale,
            )
            for layer, keys in trace.keys.items()
        ]
        q, keys = found[0].q, found[0].keys
        dtype = str(keys.dtype).removeprefix("torch.")
        yield Shape(1, length, q.shape[1], keys.shape[1], q.shape[2], dtype, f"{path.stem} row {row}"), found
