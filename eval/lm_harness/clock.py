"""Times of one ``generate`` call, taken where transformers hands tokens to a streamer."""

from __future__ import annotations

import time
from typing import Any


class TokenClock:
    """A streamer that looks at the clock when the first token arrives, and at the end."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._first: float | None = None
        self.ttft_seconds = 0.0
        self.decode_seconds = 0.0

    def put(self, value: Any) -> None:
        """Called by ``generate`` with the prompt, then with every token, both on the host."""
        now = time.perf_counter()
        if self._started is None:
            self._started = now
        elif self._first is None:
            self._first = now
            self.ttft_seconds = now - self._started

    def end(self) -> None:
        """Called by ``generate`` when it is done."""
        if self._first is not None:
            self.decode_seconds = time.perf_counter() - self._first
