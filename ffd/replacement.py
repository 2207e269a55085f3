"""Functions that stand in for others while one thread's decode step runs; other threads go on with the originals.

A model and its Python module are shared by everything that uses them: another engine's step, a prefill, stock
``generate``. What is put there for the length of a step is therefore a switch that asks which thread is calling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Any


@dataclass(frozen=True)
class Replacement:
    """A function that stands in for one of another object."""

    owner: Any
    """A module of a model, or a Python module."""
    name: str
    function: Callable[..., Any]


class _Switch:
    """What stands under a name while at least one thread has replaced it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.own = vars(owner).get(name)
        """What the owner itself held; None where its class does."""
        self._owner, self._name = owner, name
        self._original: Callable[..., Any] = getattr(owner, name)
        self._functions: dict[int, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement of this thread, or the original."""
        return self._functions.get(get_ident(), self._original)(*args, **kwargs)

    def put(self, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Replace in this thread, or for None no more; returns what did so before.

        When no thread replaces any more, the owner is as it was.
        """
        thread = get_ident()
        before = self._functions.pop(thread, None)
        if function is not None:
            self._functions[thread] = function
        elif not self._functions and vars(self._owner).get(self._name) is self:
            if self.own is None:
                del vars(self._owner)[self._name]
            else:
                vars(self._owner)[self._name] = self.own
        return before


_placing = Lock()  # held while functions are put in place or taken back, not while they are used


@contextmanager
def swapped(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Put functions in place for this thread and take them back; an owner that had one of its own gets it again."""
    placed: list[tuple[_Switch, Callable[..., Any] | None]] = []
    with _placing:
        for r in replacements:
            switch = vars(r.owner).get(r.name)
            if not isinstance(switch, _Switch):
                switch = _Switch(r.owner, r.name)
                vars(r.owner)[r.name] = switch
            placed.append((switch, switch.put(r.function)))
    try:
        yield
    finally:
        with _placing:
            for switch, before in reversed(placed):
                switch.put(before)


def standing(owner: Any, name: str) -> Any:
    """What an object itself holds under a name, whatever a step puts there for its time; None for nothing."""
    found = vars(owner).get(name)
    return found.own if isinstance(found, _Switch) else found
