"""Functions that stand in for others while one thread's decode step runs; other threads go on with the originals.

A model and its Python module are shared by everything that uses them: another engine's step, a prefill, stock
``generate``. What is put there for the length of a step is therefore a switch that asks which thread is calling. A
copy of the model made meanwhile has the originals; but a step that begins or ends while another thread copies or saves
the model changes what that thread walks through, and Python may raise there: copy and save between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, get_ident
from types import MethodType
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

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Be copied and saved as the original: as the owner's own, or as what the owner's copy has from its class."""
        return (getattr, (self._owner, self._name)) if self.own is None else (_same, (self.own,))

    def here(self) -> Callable[..., Any] | None:
        """What replaces in this thread; None for nothing."""
        return self._functions.get(get_ident())

    def put(self, function: Callable[..., Any] | None) -> None:
        """Replace in this thread, or for None no more; when no thread replaces any more, the owner is as it was."""
        if function is not None:
            self._functions[get_ident()] = function
            return
        self._functions.pop(get_ident(), None)
        if not self._functions and vars(self._owner).get(self._name) is self:
            if self.own is None:
                del vars(self._owner)[self._name]
            else:
                vars(self._owner)[self._name] = self.own


def _same(original: Any) -> Any:
    return original


_placing = Lock()  # held while functions are put in place or taken back, not while they are used


@contextmanager
def swapped(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Put functions in place for this thread and take them back; an owner that had one of its own gets it again."""
    placed: list[tuple[_Switch, Callable[..., Any] | None]] = []
    try:
        with _placing:
            for r in replacements:
                found = vars(r.owner).get(r.name)
                switch = found if isinstance(found, _Switch) else _Switch(r.owner, r.name)
                placed.append((switch, switch.here()))  # noted first, so that whatever follows is taken back
                vars(r.owner)[r.name] = switch
                switch.put(r.function)
        yield
    finally:
        with _placing:
            for switch, before in reversed(placed):
                switch.put(before)


def standing(owner: Any, name: str) -> Any:
    """What an object itself holds under a name, whatever a step puts there for its time; None for nothing.

    A method of the object's own class is nothing: a copy made during a step holds it.
    """
    found = vars(owner).get(name)
    if isinstance(found, _Switch):
        found = found.own
    of_class = isinstance(found, MethodType) and found == MethodType(getattr(type(owner), name, found), owner)
    return None if of_class else found
