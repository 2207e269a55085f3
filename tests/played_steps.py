"""Captured forced steps played by eager ones, so that what surrounds a replay is tested without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ffd import Engine


def play_captured_steps(monkeypatch: pytest.MonkeyPatch, *engines: Engine) -> None:
    """Let these engines' forced steps be captured, as far as `ffd.forced_step` can tell."""

    class Played:
        def __init__(self, step: Callable[[], None]) -> None:
            self.step = step
            self.probes = [engine.cache.probe for engine in engines]
            self.replay()

        def replay(self) -> None:
            for engine, probe in zip(engines, self.probes, strict=True):
                engine.cache.probe = probe
            self.step()
            for engine in engines:
                engine.cache.probe = None

    monkeypatch.setattr("ffd.forced_step.CapturedStep", Played)
    for engine in engines:
        engine.eager_reason = None
        monkeypatch.setattr(engine.cache, "note_replayed_step", lambda: None)  # an eager step counts itself


def step_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no two engines be stepped by one forward."""
    monkeypatch.setattr("ffd.forced_step.why_not_paired", lambda *engines: "the test asks for it")
