"""What RULER's data files hold, field by field: a file that holds something else is an error, never another prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eval.records import excerpt

Layout = Callable[[Any], None]
"""Raises `LayoutError` for a value that is laid out otherwise."""


class LayoutError(Exception):
    """A value that a file must not hold; its field is put together on the way out."""

    def __init__(self, problem: str, accepted: str) -> None:
        super().__init__(problem, accepted)
        self.field = ""
        self.problem, self.accepted = problem, accepted

    def inside(self, name: str) -> LayoutError:
        """The same, seen from what holds the value under a name or ``[position]``."""
        joint = "" if not self.field or self.field.startswith("[") else "."
        self.field = f"{name}{joint}{self.field}"
        return self

    def __str__(self) -> str:
        """Field, what is there, and what is accepted."""
        what = f"field {self.field}" if self.field else "the whole file"
        return f"{what} {self.problem}; accepted: {self.accepted}"


def leaf(accepted: str, holds: Callable[[Any], bool]) -> Layout:
    """A value that is looked at as a whole."""

    def check(value: Any) -> None:
        if not holds(value):
            raise LayoutError(f"is {excerpt(value)}", accepted)

    return check


TEXT = leaf("a string that is not blank", lambda value: isinstance(value, str) and bool(value.strip()))
STRING = leaf("a string", lambda value: isinstance(value, str))
BOOLEAN = leaf("true or false", lambda value: isinstance(value, bool))


def listed(entry: Layout, *, least: int = 1) -> Layout:
    """A list with so many entries or more."""
    whole = leaf("a list that is not empty" if least else "a list", lambda v: isinstance(v, list) and len(v) >= least)

    def check(value: Any) -> None:
        whole(value)
        for position, own in enumerate(value):
            _inside(f"[{position}]", entry, own)

    return check


def mapped(entry: Layout) -> Layout:
    """An object with any names, one or more."""
    whole = leaf("an object with one entry or more", lambda value: isinstance(value, dict) and bool(value))

    def check(value: Any) -> None:
        whole(value)
        for name, own in value.items():
            _inside(name, entry, own)

    return check


def having(**fields: Layout) -> Layout:
    """An object with these fields, and maybe others."""
    accepted = f"an object with {', '.join(fields)}"
    whole = leaf(accepted, lambda value: isinstance(value, dict))

    def check(value: Any) -> None:
        whole(value)
        for name, layout in fields.items():
            if name not in value:
                raise LayoutError("is missing", accepted).inside(name)
            _inside(name, layout, value[name])

    return check


def _inside(name: str, layout: Layout, value: Any) -> None:
    try:
        layout(value)
    except LayoutError as error:
        raise error.inside(name) from None


_ANSWERABLE = having(question=TEXT, answers=listed(having(text=TEXT)))


def _squad_question(value: Any) -> None:
    having(is_impossible=BOOLEAN)(value)
    if not value["is_impossible"]:  # of the others nothing is used
        _ANSWERABLE(value)


def squad(value: Any) -> None:
    """A SQuAD v2 file with one or more questions that its documents answer."""
    _SQUAD(value)
    if all(qa["is_impossible"] for article in value["data"] for p in article["paragraphs"] for qa in p["qas"]):
        raise LayoutError("has no question with is_impossible false", "one such question or more").inside("data")


def _paragraph(value: Any) -> None:
    leaf("a list of title and sentences", lambda pair: isinstance(pair, list) and len(pair) == 2)(value)
    for position, layout in enumerate((STRING, listed(STRING, least=0))):
        _inside(f"[{position}]", layout, value[position])


ESSAYS = having(text=TEXT)
_SQUAD = having(data=listed(having(paragraphs=listed(having(context=TEXT, qas=listed(_squad_question, least=0))))))
HOTPOTQA = listed(having(question=TEXT, answer=TEXT, context=listed(_paragraph)))
ENGLISH_WORDS = mapped(TEXT)
