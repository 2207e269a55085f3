"""Where RULER's data come from in one run: the user's folder first, then the data resolver."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from eval import data
from eval.records import TaskError
from eval.ruler.essays import Essays, official_order, starts_officially
from eval.ruler.layouts import ENGLISH_WORDS, ESSAYS, HOTPOTQA, Layout, LayoutError, squad
from eval.ruler.questions import QuestionSet, read_hotpotqa, read_squad
from eval.ruler.tasks import QuestionTask

_ENGLISH_WORDS = "english_words.json"
_ENGLISH_WORDS_SHA256 = "affcd6d45fdf3cc843d585c99c97ad615094e760e6c4756b654bab6c73bc2eca"
"""Of the file in RULER's repository, by its large-file pointer."""


def _accepted(name: str) -> str:
    if name == "nltk/punkt_tab":
        return "accepted: a folder whose english/ holds NLTK's punkt_tab files"
    return "accepted: a JSON file laid out as RULER's own"


Content = TypeVar("Content")


@dataclass(frozen=True)
class Material:
    """One file of data."""

    name: str
    path: Path
    sha256: str
    official: bool
    """Whether these are the official bytes."""

    def read(self, layout: Layout, parse: Callable[[Any], Content]) -> Content:
        """Parse the JSON content; a file that is something else is a `TaskError` that names the field."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            layout(content)
            return parse(content)
        except LayoutError as error:
            raise TaskError(f"{self.name}: {self.path}: {error}") from None
        except (OSError, ValueError) as error:
            raise self.refused(error) from None

    def refused(self, error: Exception) -> TaskError:
        """The error for content that cannot be read at all."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return TaskError(f"{self.name}: {self.path} is not what is expected here ({reason}); {_accepted(self.name)}")


class Sources:
    """The data of one run, each located once and read when a task needs it.

    Parameters
    ----------
    data_dir : Path or None
        Folder whose files take the place of the resolver's.
    """

    def __init__(self, data_dir: Path | None) -> None:
        self._data_dir = data_dir
        self._materials: dict[str, Material] = {}

    def locate(self, name: str) -> Material:
        """Find a source of `eval.data`, fetching it if need be.

        Raises
        ------
        eval.data.SourceUnavailable
            It cannot be had here; says what the user may give instead.
        """
        if name not in self._materials:
            pinned = {Path(file.name).name: file.sha256 for file in data.SOURCES[name].files}
            path = self._own_copy(name) or self._resolve(name, list(pinned))
            if not path.is_dir():
                sha256 = _sha256(name, path)
                official = sha256 in pinned.values()
            elif official := data.is_pinned(name, path):
                sha256 = data.SOURCES[name].key
            else:
                sha256 = "-".join(_sha256(name, path / file.name) for file in data.SOURCES[name].files)
            self._materials[name] = Material(name, path, sha256, official)
        return self._materials[name]

    def is_given(self, name: str) -> bool:
        """Whether the user's folder holds a source, so that the resolver is not asked."""
        return self._own_copy(name) is not None

    def _resolve(self, name: str, files: Sequence[str]) -> Path:
        try:
            return data.resolve(name)
        except data.SourceUnavailable as error:
            if len(files) > 1:  # a folder, for which a file of the user's folder cannot stand
                raise
            (file,) = files
            raise data.SourceUnavailable(
                name, f"{error.reason}; or set task.data_dir= to a folder that holds {file}"
            ) from None

    @cached_property
    def _essay_text(self) -> tuple[str, bool]:
        material = self.locate("ruler/essays")
        text = material.read(ESSAYS, lambda content: str(content["text"]))
        if material.official:
            text = official_order(text)
        return text, starts_officially(text)

    @property
    def official_essays(self) -> bool:
        """Whether the haystack begins with the 49 essays in official order."""
        return self._essay_text[1]

    @cached_property
    def essays(self) -> Essays:
        """The haystack of the essay tasks."""
        text, punkt = self._essay_text[0], self.locate("nltk/punkt_tab")
        try:
            return Essays(text, punkt.path)
        except (OSError, ValueError) as error:
            raise punkt.refused(error) from None

    @cached_property
    def squad(self) -> QuestionSet:
        """Questions of qa_1."""
        return self.locate("ruler/squad").read(squad, read_squad)

    @cached_property
    def hotpotqa(self) -> QuestionSet:
        """Questions of qa_2."""
        return self.locate("ruler/hotpotqa").read(HOTPOTQA, read_hotpotqa)

    def questions(self, task: QuestionTask) -> QuestionSet:
        """Questions of a task."""
        return self.squad if task.dataset == "squad" else self.hotpotqa

    @cached_property
    def _long_list_material(self) -> Material | None:
        path = self._own(_ENGLISH_WORDS)
        if path is None:
            return None
        sha256 = _sha256(_ENGLISH_WORDS, path)
        return Material(_ENGLISH_WORDS, path, sha256, sha256 == _ENGLISH_WORDS_SHA256)

    @property
    def official_long_list(self) -> bool:
        """Whether the long word list, if there is one, is RULER's."""
        return self._long_list_material is None or self._long_list_material.official

    @cached_property
    def long_list(self) -> Sequence[str] | None:
        """Words for cwe beyond its usual list, if the user supplied them."""
        material = self._long_list_material
        return None if material is None else material.read(ENGLISH_WORDS, lambda content: list(content.values()))

    def fingerprint(self, names: Sequence[str], *, long_list: bool) -> dict[str, str]:
        """Sha256 by name of the data that a task's prompts depend on."""
        found = {name: self.locate(name).sha256 for name in names}
        if long_list and self._long_list_material is not None:
            found[_ENGLISH_WORDS] = self._long_list_material.sha256
        return found

    def _own_copy(self, name: str) -> Path | None:
        files = data.SOURCES[name].files
        return self._own(Path(files[0].name).name) if len(files) == 1 else None

    def _own(self, filename: str) -> Path | None:
        if self._data_dir is None or not (self._data_dir / filename).exists():
            return None
        return self._data_dir / filename


def _sha256(name: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TaskError(f"{name}: {path} cannot be read ({error.strerror or error}); {_accepted(name)}") from None
