"""Decode steps of an engine from one state, to which it can be rewound: the same steps again, as often as needed.

A window of steps sees the same tokens at the same positions over the same keys, whatever the model would
have chosen, so that what is kept can be set by measuring and does not drift while it is timed. Only state
is put in place here; the steps are the engine's own, captured or eager, the choice of a token included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ffd.engine import Engine

WINDOW = 8
"""Steps between two rewinds, which is as often as the engine looks at its stop flags."""


class Steps:
    """Steps after a prompt of ``tokens`` random keys and values a row.

    Parameters
    ----------
    engine
        With a capacity of at least ``tokens + WINDOW``, all of its layers full attention.
    tokens
        Tokens in the cache before each window.
    """

    def __init__(self, engine: Engine, tokens: int) -> None:
        self.engine = engine
        self.tokens = tokens
        self.cache = engine.cache
        self.storages = [handle.storage for handle in engine.cache.handles]
        vocabulary = engine.model.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randint(vocabulary, (WINDOW, *engine._state.token.shape), generator=generator)
        self._inputs = inputs.to(engine.device).unbind()

    @property
    def captured(self) -> bool:
        """Whether steps are replays of a graph."""
        return self.engine._captured is not None

    def fill(self) -> float:
        """Store random keys and values; returns ms that storing them took, over all layers.

        That is what the method adds to a prefill: for dense a copy, for others thumbnails, codes or bounds too.
        """
        engine = self.engine
        engine._prepare_capture()
        engine._begin([self.tokens] * engine._state.token.shape[0], (), 0)
        generator = torch.Generator(engine.device).manual_seed(1)
        took = []
        for storage in self.storages:
            g = storage.geometry
            shape = (g.batch_size, g.num_kv_heads, self.tokens, g.head_dim)
            keys, values = (torch.randn(shape, dtype=g.dtype, device=g.device, generator=generator) for _ in range(2))
            with stopwatch(engine.device) as elapsed:
                storage.prefill(keys, values)
            took.append(elapsed.milliseconds())
        # The median, since the first layer meets an allocator that has nothing to give yet.
        return statistics.median(took) * len(took)

    def rewind(self) -> None:
        """Go back to the first step after the prompt."""
        state = self.engine._state
        state.position.fill_(self.tokens)
        state._new_tokens.fill_(1)
        self.cache.rows.active.fill_(1)  # a row whose logits were not finite has ended, and is timed all the same
        self.cache.rows.lengths.fill_(self.tokens)
        self.cache.rows.counted = self.tokens
        self.cache.seen_tokens = self.tokens

    def window(self, *, eager: bool = False) -> None:
        """Run `WINDOW` steps from the first."""
        self.rewind()
        self._run(eager)

    def _run(self, eager: bool) -> None:
        """Replays of the captured graph, or the same step launched from Python."""
        captured = self.engine._captured
        for tokens in self._inputs:
            self.engine._state.token.copy_(tokens)
            if captured is None or eager:
                self.engine._step()
            else:
                captured.replay()
                self.cache.note_replayed_step()

    def time(self, windows: int, *, eager: bool = False) -> float:
        """Median over windows of the ms a step takes; the ledger counts the timed steps alone."""
        self.window(eager=eager)
        self.clear()
        watches = []
        for _ in range(windows):
            self.rewind()
            with stopwatch(self.engine.device) as elapsed:
                self._run(eager)
            watches.append(elapsed)
        return statistics.median(watch.milliseconds() for watch in watches) / WINDOW

    def capture_anew(self) -> float:
        """Milliseconds to capture a step once more and replay it for the first time."""
        self.rewind()
        torch.cuda.synchronize(self.engine.device)
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.engine._step()
        graph.replay()
        torch.cuda.synchronize(self.engine.device)
        return 1e3 * (time.perf_counter() - started)

    def clear(self) -> None:
        """Start the ledger anew."""
        for storage in self.storages:
            storage.ledger.reset()

    def kept(self) -> float:
        """Tokens loaded of those visible since `clear`, union per kv head, over all layers."""
        counts = [storage.ledger.counts() for storage in self.storages]
        return float(sum(c.union.sum() for c in counts) / sum(c.context.sum() for c in counts))

    def bytes_per_step(self) -> float:
        """Bytes of the cache that the counted steps had to read, per step of the whole batch."""
        total, steps = 0.0, 0.0
        for storage in self.storages:
            counts = storage.ledger.counts()
            total += float(sum(stage.sum() for stage in storage.bytes_read(counts).values()))
            steps = float(counts.steps[0, 0])
        return total / steps


class Stopwatch:
    """Time between two marks on the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note the time, on a GPU without waiting for it."""
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> float:
        """Between the marks; waits for the device."""
        start, end = self._marks
        if self._cuda:
            end.synchronize()
            return float(start.elapsed_time(end))
        return float(1e3 * (end - start))


@contextmanager
def stopwatch(device: torch.device) -> Iterator[Stopwatch]:
    """Time what is inside."""
    watch = Stopwatch(device)
    watch.mark()
    yield watch
    watch.mark()


def stored_bytes(storage: object) -> int:
    """Bytes of the tensors that hold one layer's tokens: rows, counters and scratch memory are not among them.

    Parameters
    ----------
    storage
        A method's layer; selection metadata in objects of their own (page bounds) count.
    """
    total = 0
    for name, value in vars(storage).items():
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        elif name not in ("geometry", "rows", "ledger", "method") and hasattr(value, "__dict__"):
            total += stored_bytes(value)
    return total
