"""``python run.py --help``: the choices and comments of conf/, on a screen or two."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from experiments.errors import UsageError
from experiments.keys import CONF, GROUPS, Key, annotated, choice, of_group, options
from experiments.recipes import ALL, SIZES

_FLAGS = ("--help", "-h")
_BRIEF = ("fidelity", "calibrate", "bench")
"""Sections that the first page has one line of: they belong to runners of their own."""
_WIDTH = 120
_COLUMN = 40

_EXAMPLES = """\
ffd: sparse-attention decoding for long contexts, measured.

  python run.py                                            RULER with FFD, sized to this machine
  python run.py method=quest method.token_budget=512 task.length=4096 'task.tasks=[niah_single_1,vt]'
  python run.py model=llama31_8b task.length=32768         a model of the hub, at the length asked for
  python run.py model.path=/models/my-llama dry_run=true   your own model; plan and estimate only
  python run.py runner=prompts task=longbench              the prompts alone
  python run.py -m method=dense,ffd delta=3,5,7            every combination, one after the other
  python run.py experiment=ruler_32k size=smoke            a recipe of the paper"""

_MORE = """\
More: --help NAME for any of {sections} (all keys), {groups} (what each choice is);
--help method=quest, --help task=longbench for the keys of another choice. README.md and docs/ have the rest:
docs/methods/ a page per method, docs/benchmarks/ per task, docs/outputs.md what a run leaves."""


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for this page."""
    return any(argument in _FLAGS for argument in arguments)


def help_page(arguments: Sequence[str]) -> str:
    """The page, or the part of it that the arguments beside ``--help`` name.

    Raises
    ------
    UsageError
        For a name that is neither a section nor a group, or a choice that there is not.
    """
    rest = [argument for argument in arguments if argument not in _FLAGS]
    names = [argument for argument in rest if "=" not in argument]
    for group in GROUPS:
        chosen = choice(rest, group)
        if chosen not in options(group):
            raise UsageError(f"{group}={chosen}: expected one of {', '.join(options(group))}")
    parts = [_part(name) for name in names] or [_first_page(rest)]
    return "\n\n".join(parts)


def _first_page(overrides: Sequence[str]) -> str:
    parts = [_EXAMPLES, "\n".join(["Groups (GROUP=NAME)", *_groups()])]
    for group in GROUPS:
        name = choice(overrides, group)
        parts.append(_titled(f"{group}={name}: {of_group(group, name).header}", of_group(group, name).keys))
    sections = _sections()
    parts.insert(2, _titled("Every run (KEY=VALUE; the default is shown)", sections.pop("")))
    parts += [_section(name, keys) for name, keys in sections.items() if name not in _BRIEF]
    brief = (_line(f"{name}: see --help {name}", sections[name][0].phrase) for name in _BRIEF)
    parts.append("\n".join(line for lines in brief for line in lines))
    parts.append(_MORE.format(sections=", ".join(_BRIEF), groups=", ".join([*GROUPS, "experiment"])))
    return "\n\n".join(parts)


def _groups() -> Iterator[str]:
    for group in GROUPS:
        yield from _line(group, ", ".join(options(group)), column=14)
    recipes = ", ".join([*options("experiment"), ALL])
    yield from _line("experiment", f"{recipes}; with size={', '.join(SIZES)}", column=14)


def _part(name: str) -> str:
    sections = _sections()
    if name in sections and name:
        return _section(name, sections[name])
    if name not in (*GROUPS, "experiment"):
        known = [section for section in sections if section]
        raise UsageError(f"--help {name}: expected one of {', '.join([*known, *GROUPS, 'experiment'])}")
    said = [_line(f"{name}={o}", annotated(CONF / name / f"{o}.yaml").header) for o in options(name)]
    return "\n".join(line for lines in said for line in lines)


def _sections() -> dict[str, list[Key]]:
    """Keys of ``conf/config.yaml`` by the section they are in; "" for those that are in none."""
    sections: dict[str, list[Key]] = {"": []}
    keys = annotated(CONF / "config.yaml").keys
    parents = {key.name.partition(".")[0] for key in keys if "." in key.name}
    for key in keys:
        section = key.name.partition(".")[0]
        sections.setdefault(section if section in parents else "", []).append(key)
    return sections


def _section(name: str, keys: Sequence[Key]) -> str:
    return _titled(f"{name}: {keys[0].phrase}", keys[1:])


def _titled(title: str, keys: Iterable[Key]) -> str:
    lines = [title]
    for key in keys:
        if key.heading:
            lines.append(f"  {key.heading}:")
        lines += _line(f"{key.name}={key.default}" if key.default else key.name, key.phrase)
    return "\n".join(lines)


def _line(left: str, said: str, column: int = _COLUMN) -> list[str]:
    """A key and what is said of it, which goes on in a column of its own."""
    wrapped = textwrap.wrap(said, _WIDTH - column, break_long_words=False, break_on_hyphens=False)
    if len(left) + 4 > column:
        return [f"  {left}", *(" " * column + line for line in wrapped)]
    first, *others = wrapped or [""]
    return [f"  {left:{column - 3}} {first}".rstrip(), *(" " * column + line for line in others)]
