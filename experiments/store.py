"""The run store: one folder per run, written so that a crash, a kill or a full disk loses no finished sample.

``outputs/runs/<run id>/`` holds ``config.yaml``, ``environment.json``, ``samples.jsonl`` (one line per
finished sample, appended and synced), ``fidelity/`` and ``summary.json``. ``summary.json`` exists from
the first moment, saying that the run has not finished; it is replaced when the run ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from experiments.errors import UsageError
from experiments.under_sweep import announce_run

_RESERVE_BYTES = 256 * 1024
"""Released when the disk is full, so that the failure itself can be recorded."""


class RunStore:
    """Folder of one run, held by one process at a time.

    Parameters
    ----------
    root
        The outputs folder.
    run_id
        Identity of the run.

    Raises
    ------
    UsageError
        If another process is writing this run.
    """

    def __init__(self, root: Path, run_id: str) -> None:
        self.folder = root / "runs" / run_id
        self.run_id = run_id
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise UsageError(f"out={root}: cannot be written ({error.strerror})") from None
        self._samples: IO[bytes] | None = None
        self.take_locks()
        announce_run(run_id)

    def take_locks(self, *, shared: bool = False) -> None:
        """Hold the run, alone or together with others that share it; raise `UsageError` if that cannot be."""
        try:
            fcntl.flock(self._lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"run {self.run_id}: another process is writing it") from None

    @property
    def work(self) -> Path:
        """Where this process writes samples and fidelity."""
        return self.folder

    @property
    def samples_path(self) -> Path:
        """The file of finished samples."""
        return self.work / "samples.jsonl"

    @property
    def reserve_path(self) -> Path:
        """Ballast, see `_RESERVE_BYTES`."""
        return self.work / ".reserve"

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Hold the files that several processes of one run may write; alone, there is nothing to hold."""
        yield

    def published(self) -> dict[str, Any] | None:
        """The summary, if another process of the same run has finished it meanwhile."""
        return None

    def summary(self) -> dict[str, Any] | None:
        """The stored summary, or None before the run began."""
        return read_json(self.folder / "summary.json")

    def set_aside(self) -> None:
        """Move everything an earlier run left into ``previous/``, replacing what was there."""
        earlier = [p for p in self.folder.iterdir() if p.name not in (".lock", "previous")]
        if not earlier:
            return
        previous = self.folder / "previous"
        shutil.rmtree(previous, ignore_errors=True)
        previous.mkdir()
        for path in earlier:
            path.rename(previous / path.name)

    def finished_samples(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Samples already done, by task and index; a line torn by a kill is cut off for good."""
        done, intact = _intact_samples(self.samples_path)
        if self.samples_path.exists() and intact < self.samples_path.stat().st_size:
            with self.samples_path.open("r+b") as file:
                file.truncate(intact)
        return done

    def append_sample(self, row: dict[str, Any]) -> None:
        """Append one finished sample and wait until it is on the disk."""
        if self._samples is None:
            self._samples = self.samples_path.open("ab", buffering=0)
        line = _line(row)
        start = os.fstat(self._samples.fileno()).st_size
        try:
            written = self._samples.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._samples.fileno())
        except OSError:
            os.ftruncate(self._samples.fileno(), start)  # no torn line stays behind
            raise

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the run atomically."""
        write_atomically(self.folder / name, text.encode())

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file of the run atomically."""
        self.write_text(name, json.dumps(json_ready(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def reserve(self) -> None:
        """Put the ballast in place."""
        if not self.reserve_path.exists():
            self.reserve_path.write_bytes(b"\0" * _RESERVE_BYTES)

    def release_reserve(self) -> None:
        """Give the ballast's space back."""
        self.reserve_path.unlink(missing_ok=True)

    def discard_if_empty(self) -> None:
        """Remove the folder if no sample was ever finished in it: a run that could not begin leaves nothing."""
        if not self.samples_path.exists() and not (self.folder / "previous").exists():
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Release files and the lock."""
        if self._samples is not None:
            self._samples.close()
            self._samples = None
        self._lock.close()


def read_samples(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Whole rows of a file of samples by task and index, none where there is no file; nothing is changed."""
    return _intact_samples(path)[0]


def write_samples(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a whole file of samples atomically."""
    write_atomically(path, b"".join(_line(row) for row in rows))


def _intact_samples(path: Path) -> tuple[dict[tuple[str, int], dict[str, Any]], int]:
    """Rows up to the first line that a kill tore, and the bytes they take."""
    done: dict[tuple[str, int], dict[str, Any]] = {}
    intact = 0
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return done, 0
    for line in lines:
        try:
            row = json.loads(line)
            key = row["task"], row["index"]
        except (ValueError, KeyError, TypeError):
            break
        if not line.endswith(b"\n"):
            break
        done[key] = row
        intact += len(line)
    return done, intact


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def json_ready(value: Any) -> Any:
    """The value with non-finite numbers, which JSON does not have, as the strings that the command line takes."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return value


def read_json(path: Path) -> Any:
    """Parse a JSON file, or None where it does not exist."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def iterate_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file."""
    with path.open() as file:
        for line in file:
            yield json.loads(line)
