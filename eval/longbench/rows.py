"""Official LongBench rows from a folder of JSONL files or from the official zip."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from eval.longbench import jsonl
from eval.longbench.datasets import DATASETS
from eval.longbench.metrics import classification
from eval.records import TaskError

SOURCE = "a folder of LongBench's <dataset>.jsonl files, or their data.zip"
"""What official rows are read from, in words."""
_SCHEMA: Mapping[str, jsonl.Kind] = {
    "input": jsonl.TEXT,
    "context": jsonl.TEXT,
    "answers": jsonl.TEXTS,
    "length": jsonl.INTEGER,
    "dataset": jsonl.TEXT,
    "language": jsonl.TEXT,
    "all_classes": jsonl.TEXTS_OR_NULL,
    "_id": jsonl.TEXT,
}


@dataclass(frozen=True)
class Row:
    """One official row, checked."""

    input: str
    context: str
    answers: tuple[str, ...]
    length: int
    """English words or Chinese characters of the row's text."""
    all_classes: tuple[str, ...] | None
    id: str


@dataclass(frozen=True)
class RowSource:
    """Dataset files of one folder or zip, by dataset name (``_e`` appended for LongBench-E)."""

    path: Path
    members: Mapping[str, str]
    """Path inside the folder or the zip, by name."""

    def file(self, name: str) -> Path:
        """Path of a dataset's file, the zip's path included."""
        return self.path / self.members[name]

    def count(self, name: str) -> int:
        """Number of rows of a dataset, unparsed."""
        with self._open(name) as lines:
            return sum(1 for line in lines if line.strip())

    def read(self, name: str) -> Iterator[Row]:
        """Rows of a dataset in file order, each checked as it is read.

        Raises
        ------
        TaskError
            The file cannot be read, or a row departs from the official schema.
        """
        needs_classes = DATASETS[name.removesuffix("_e")].metric is classification
        schema = {**_SCHEMA, "all_classes": jsonl.CLASSES} if needs_classes else _SCHEMA
        with self._open(name) as lines:
            for item in jsonl.read_objects(lines, self.file(name), schema):
                classes = item["all_classes"]
                yield Row(
                    input=item["input"],
                    context=item["context"],
                    answers=tuple(item["answers"]),
                    length=item["length"],
                    all_classes=None if classes is None else tuple(classes),
                    id=item["_id"],
                )

    @contextmanager
    def _open(self, name: str) -> Iterator[TextIO]:
        with jsonl.reading(self.file(name)):
            if self.path.is_dir():
                with self.file(name).open(encoding="utf-8") as lines:
                    yield lines
            else:
                with zipfile.ZipFile(self.path) as archive, archive.open(self.members[name]) as file:
                    yield io.TextIOWrapper(file, encoding="utf-8")


def open_source(path: Path) -> RowSource:
    """Find the dataset files of a folder or a zip; none of them is read yet.

    Parameters
    ----------
    path
        Folder with ``<dataset>.jsonl`` files, at its top or in its folder ``data``, or a zip with
        such files at any depth.

    Raises
    ------
    TaskError
        `path` is neither, cannot be read, or holds no or two files of one dataset.
    """
    members: dict[str, str] = {}
    for member in _list(path):
        name, _, ending = Path(member).name.partition(".")
        if ending != "jsonl" or name.removesuffix("_e") not in DATASETS:
            continue
        if name in members:
            raise TaskError(f"{path}: two files of {name}, {members[name]} and {member}; accepted: one")
        members[name] = member
    if not members:
        raise TaskError(f"{path}: no LongBench file; accepted: {SOURCE}")
    return RowSource(path, members)


def _list(path: Path) -> list[str]:
    if not path.exists():
        raise TaskError(f"{path}: does not exist; accepted: {SOURCE}")
    with jsonl.reading(path):
        if path.is_dir():
            files = [*path.glob("*.jsonl"), *(path / "data").glob("*.jsonl")]
            return sorted(str(file.relative_to(path)) for file in files)
        with zipfile.ZipFile(path) as archive:
            return sorted(archive.namelist())
