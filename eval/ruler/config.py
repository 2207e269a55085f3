"""What a user may choose about a RULER run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eval.records import TaskError
from eval.ruler.tasks import TASKS
from eval.ruler.templates import ACCEPTED

DATA_FILES = ("squad.json", "hotpotqa.json", "PaulGrahamEssays.json", "english_words.json")
"""What is looked for in ``data_dir``."""
LARGEST_SEED = 2**32 - 1
"""Largest seed that numpy's generator takes."""


@dataclass(frozen=True)
class RulerConfig:
    """Configuration of RULER; the defaults are the official protocol's.

    Parameters
    ----------
    length : int
        Tokens of prompt and generation together (officially 4096 to 131072).
    tasks : tuple of str, optional
        Tasks to run; None means all 13, without those that cannot fit the length.
    samples : int
        Prompts per task.
    template : str
        ``auto``, an official template's name, or ``chat`` (see `eval.ruler.templates`).
    seed : int
        Seed of the generators.
    data_dir : str, optional
        Folder with files of the user: ``squad.json``, ``hotpotqa.json``, ``PaulGrahamEssays.json``
        take the place of the fetched ones; ``english_words.json`` (RULER's repository holds it as a
        large file) is needed by cwe near 128K.
    cache_dir : str, optional
        Folder of the generated prompts; by default ``ruler`` in the cache of `eval.data`.

    Raises
    ------
    TaskError
        A value that cannot be used.
    """

    length: int
    tasks: tuple[str, ...] | None = None
    samples: int = 500
    template: str = "auto"
    seed: int = 42
    data_dir: str | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        _whole_number("length", self.length, 1, None)
        _whole_number("samples", self.samples, 1, None)
        _whole_number("seed", self.seed, 0, LARGEST_SEED)
        if self.template not in ACCEPTED:
            raise TaskError(f"task.template={self.template!r}: unknown template; accepted: {', '.join(ACCEPTED)}")
        if self.tasks is not None:
            _known_tasks(self.tasks)
        if self.data_dir is not None:
            _holds_data(Path(self.data_dir))

    @property
    def selected(self) -> tuple[str, ...]:
        """Tasks asked for, each once, in the official order."""
        return tuple(task for task in TASKS if self.tasks is None or task in self.tasks)


def _whole_number(key: str, value: object, smallest: int, largest: int | None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and smallest <= value and (largest is None or value <= largest):  # type: ignore[operator]
        return
    accepted = f"from {smallest} to {largest}" if largest is not None else f"of at least {smallest}"
    raise TaskError(f"task.{key}={value!r}: must be a whole number {accepted}")


def _holds_data(folder: Path) -> None:
    accepted = f"a folder with one or more of {', '.join(DATA_FILES)}"
    if not folder.is_dir():
        raise TaskError(f"task.data_dir={folder}: no such folder; accepted: {accepted}")
    if not any((folder / name).exists() for name in DATA_FILES):  # all would be fetched, as if nothing were given
        raise TaskError(f"task.data_dir={folder}: holds no file of RULER's; accepted: {accepted}")


def _known_tasks(tasks: tuple[str, ...]) -> None:
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        problem = f"unknown RULER task {unknown[0]!r}" if unknown else "no task is named"
        raise TaskError(f"task.tasks={list(tasks)}: {problem}; accepted: {', '.join(TASKS)}")
