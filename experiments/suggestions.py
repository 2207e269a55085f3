"""The end of the line for a key that there is not: what was probably meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from experiments.keys import GROUPS, choice, known_keys

_LEAST_LIKENESS = 0.75
"""Of two spellings, as difflib measures it: ``lenght`` and ``length`` have 0.83."""
_MOST = 3

Chosen = Mapping[str, Sequence[str]]
"""By group, the names it has in a run or sweep."""


def unknown_key(key: str, typed: str, overrides: Sequence[str] = ()) -> str:
    """Say that there is no such key, and which one was probably meant.

    Parameters
    ----------
    key
        As far as it was read: ``task.lenght``.
    typed
        What the user typed: ``task.lenght=2000``.
    overrides
        The command line, for the groups it chooses.
    """
    meant = meant_instead(key, typed, {group: [choice(overrides, group)] for group in GROUPS})
    return f"{typed}: there is no key {key}{meant or '; see python run.py --help and conf/'}"


def meant_instead(key: str, typed: str, chosen: Chosen) -> str:
    """What was probably meant by a key, with a semicolon before it; empty where nothing comes near."""
    owners = known_keys().get(key, ())
    if owners:
        return f"; it is a key of {key.partition('.')[0]}={_either(owners)}"
    meant = _suggestions(key, chosen)
    if not meant:
        return ""
    _, sign, value = typed.partition("=")
    return f"; did you mean {_either([_shown(other, sign + value, chosen) for other in meant])}?"


def _suggestions(key: str, chosen: Chosen) -> list[str]:
    """Keys of the same last name elsewhere, else of the closest spelling; those that the run has, if it has any."""
    known, leaf = known_keys(), _leaf(key)
    found = [other for other in known if _leaf(other).casefold() == leaf.casefold()]
    if not found:
        likeness = {other: _likeness(leaf, _leaf(other)) for other in known}
        best = max(likeness.values())
        found = [other for other in known if likeness[other] == best >= _LEAST_LIKENESS]
    beside = [other for other in found if _parent(other) == _parent(key) != ""] or found
    return ([other for other in beside if _in_use(other, chosen)] or beside)[:_MOST]


def _shown(key: str, assigned: str, chosen: Chosen) -> str:
    where = "" if _in_use(key, chosen) else f" (with {key.partition('.')[0]}={_either(known_keys()[key])})"
    return f"{key}{assigned}{where}"


def _in_use(key: str, chosen: Chosen) -> bool:
    owners = known_keys()[key]
    return not owners or not set(owners).isdisjoint(chosen.get(key.partition(".")[0], ()))


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one.casefold(), other.casefold()).ratio()
