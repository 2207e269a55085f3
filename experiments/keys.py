"""The keys that conf/ has, with their defaults and what its comments say of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CONF = Path(__file__).resolve().parent.parent / "conf"
GROUPS = ("method", "task", "model")
"""Folders of ``conf/`` whose files are chosen by name and have keys of their own."""

_KEY = re.compile(r"(?P<indent> *)(?P<name>\w+):(?: +(?P<value>[^#]*?))?(?: *# (?P<phrase>.*))?")
_COMMENT = re.compile(r"(?P<indent> *)# (?P<phrase>.*)")
_DEEPEST = 8
"""Columns of indentation that a key may have; a comment further right goes on with the one above."""


@dataclass(frozen=True)
class Key:
    """One key as its file has it."""

    name: str
    """As it is typed: ``fidelity.every``."""
    default: str
    """As the file writes it; empty for a key that has others below it."""
    phrase: str
    """Its comment."""
    heading: str
    """Comment on the line above: what it and the keys after it have in common."""


@dataclass(frozen=True)
class Annotated:
    """A file of ``conf/``."""

    header: str
    """Comment that the file begins with."""
    keys: tuple[Key, ...]


@cache
def annotated(path: Path, prefix: str = "") -> Annotated:
    """Read the keys of a YAML file together with its comments.

    Parameters
    ----------
    path
        File in the style of ``conf/``: block mappings, two spaces a level, comments after values.
    prefix
        Put before each name: ``method.`` for a file in ``conf/method``.
    """
    header: list[str] = []
    keys: list[Key] = []
    above: list[str] = []
    heading = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        comment = _COMMENT.fullmatch(line)
        if comment is not None and not keys and not above:
            header.append(comment["phrase"])
        elif comment is not None and len(comment["indent"]) > _DEEPEST:
            last = keys.pop()
            keys.append(Key(last.name, last.default, f"{last.phrase} {comment['phrase']}", last.heading))
        elif comment is not None:
            heading = comment["phrase"]
        elif (found := _KEY.fullmatch(line)) is not None:
            above = [*above[: len(found["indent"]) // 2], found["name"]]
            name, value = prefix + ".".join(above), found["value"] or ""
            keys.append(Key(name, value, found["phrase"] or "", heading))
            heading = ""
    return Annotated(
        " ".join(header), tuple(key for key in keys if key.name.split(".")[0] not in ("defaults", "hydra"))
    )


def options(group: str) -> list[str]:
    """Names that a group may have: its files."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def of_group(group: str, name: str) -> Annotated:
    """Header and keys of one choice of a group, its name left out."""
    found = annotated(CONF / group / f"{name}.yaml", f"{group}.")
    return Annotated(found.header, tuple(key for key in found.keys if key.name != f"{group}.name"))


def choice(overrides: Sequence[str], group: str) -> str:
    """Name that a group, or a key of its own such as ``runner``, has in these overrides, or by default."""
    for override in overrides:
        key, assigned, value = override.partition("=")
        if key == group and assigned:
            return value
    config = base_config()
    groups = [entry for entry in config["defaults"] if isinstance(entry, dict)]
    return next(str(entry[group]) for entry in (*groups, config) if group in entry)


@cache
def base_config() -> dict[str, Any]:
    """What ``conf/config.yaml`` says, read once; not to be changed."""
    import yaml

    return dict(yaml.safe_load((CONF / "config.yaml").read_text()))


@cache
def known_keys() -> dict[str, tuple[str, ...]]:
    """Every key that can be typed, with the choices of its group that have it; () where all runs do."""
    known: dict[str, tuple[str, ...]] = dict.fromkeys((*GROUPS, "experiment", "size"), ())
    for group in GROUPS:
        for name in options(group):
            for key in of_group(group, name).keys:
                known[key.name] = (*known.get(key.name, ()), name)
    return known | {key.name: () for key in annotated(CONF / "config.yaml").keys}
