"""The run store: one folder per run, written so that a crash, a kill or a full disk loses no finished sample.

``outputs/runs/<run id>/`` holds ``config.yaml``, ``environment.json``, ``samples.jsonl`` (one line per
finished sample, appended and synced), ``fidelity/`` and ``summary.json``. ``summary.json`` exists from
the first moment, saying that the run has not finished; it is replaced when the run ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from experiments.errors import UsageError
from experiments.files import clear_leftovers, json_ready, read_json, write_atomically
from experiments.progress import console
from experiments.under_sweep import announce_run

Rows = dict[tuple[str, int], dict[str, Any]]
"""Finished rows of ``samples.jsonl`` by task and index, in the order in which they finished."""
_RESERVE_BYTES = 256 * 1024
"""Released when the disk is full, so that the failure itself can be recorded."""
_TRACEBACK = "traceback.txt"
_BEGINNING = frozenset(
    {".lock", ".reserve", "config.yaml", "environment.json", "engine.json", "summary.json", _TRACEBACK}
)
"""Files of a run that has finished no sample."""


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
        self._created = not self.folder.exists()
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
    def summary_path(self) -> Path:
        """The file that says how far the run came."""
        return self.folder / "summary.json"

    @property
    def reserve_path(self) -> Path:
        """Ballast, see `_RESERVE_BYTES`."""
        return self.work / ".reserve"

    @property
    def traceback_path(self) -> Path:
        """Of the error that ended this process's part of the run, if one did."""
        return self.work / _TRACEBACK

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Hold the files that several processes of one run may write; alone, there is nothing to hold."""
        yield

    def published(self) -> dict[str, Any] | None:
        """The summary, if another process of the same run has finished it meanwhile."""
        return None

    def summary(self) -> dict[str, Any] | None:
        """The stored summary, or None before the run began; `UsageError` names a damaged one."""
        path = self.summary_path
        summary = read_json(path)
        if summary is not None and not (isinstance(summary, dict) and {"status", "run_id"} <= summary.keys()):
            raise UsageError(f"{path}: not a run's summary; move the file away, or repeat the run with rerun=true")
        return summary

    def set_aside(self) -> None:
        """Move everything an earlier run left into ``previous/``, replacing what was there.

        A repetition that was interrupted is continued instead: the finished run is in ``previous/`` already.
        """
        if (self.folder / "previous").exists() and self._unfinished():
            return
        earlier = [p for p in self.folder.iterdir() if p.name not in (".lock", "previous")]
        if not earlier:
            return
        previous = self.folder / "previous"
        shutil.rmtree(previous, ignore_errors=True)
        previous.mkdir()
        for path in earlier:
            path.rename(previous / path.name)

    def _unfinished(self) -> bool:
        try:
            summary = self.summary()
        except UsageError:
            return False
        return summary is not None and summary["status"] not in ("complete", "invalid")

    def finished_samples(self) -> Rows:
        """Samples already done, by task and index; nothing is changed."""
        return read_samples(self.samples_path)

    def latest(self, rows: Rows) -> Rows:
        """All finished samples when this process has done its part; alone, it knows them."""
        return rows

    def append_sample(self, row: dict[str, Any]) -> None:
        """Append one finished sample and wait until it is on the disk; a line torn by a kill is cut off first."""
        if self._samples is None:
            cut_torn_line(self.samples_path)
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
        write_atomically(self.folder / name, _utf8(text))

    def write_traceback(self, text: str) -> None:
        """Write what `traceback_path` names atomically."""
        write_atomically(self.traceback_path, _utf8(text))

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file of the run atomically."""
        self.write_text(name, json.dumps(json_ready(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def reserve(self) -> None:
        """Put the ballast in place, and take away what a killed process left half written."""
        clear_leftovers(self.work)
        if not self.reserve_path.exists():
            self.reserve_path.write_bytes(b"\0" * _RESERVE_BYTES)

    def release_reserve(self) -> None:
        """Give the ballast's space back."""
        self.reserve_path.unlink(missing_ok=True)

    def discard_if_empty(self) -> None:
        """Remove a folder that this process made, if nothing was run: looking leaves nothing."""
        if self._created and not self.samples_path.exists() and not self.summary_path.exists():
            shutil.rmtree(self.folder, ignore_errors=True)

    def withdraw(self) -> bool:
        """Remove a run that could not begin, if nothing but what beginning leaves is there, by whomever."""
        if any(path.name not in _BEGINNING for path in self.folder.iterdir()):
            return False
        shutil.rmtree(self.folder, ignore_errors=True)
        return True

    def close(self) -> None:
        """Release files and the lock."""
        if self._samples is not None:
            self._samples.close()
            self._samples = None
        self._lock.close()


def read_samples(path: Path) -> Rows:
    """Whole rows of a file of samples by task and index, none where there is no file; nothing is changed.

    A line that is not a sample is left out and said so, and does not take the rows after it along; a last
    line without its end was torn by a kill and is left out in silence.
    """
    done: Rows = {}
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return done
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
            done[str(row["task"]), int(row["index"])] = row
        except (ValueError, KeyError, TypeError):
            console.print(f"{path}: line {number} is damaged; its sample counts as not done")
    return done


def cut_torn_line(path: Path) -> None:
    """Cut off a last line that a kill tore."""
    if path.exists():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)


def write_samples(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a whole file of samples atomically."""
    write_atomically(path, b"".join(_line(row) for row in rows))


def _line(row: Mapping[str, Any]) -> bytes:
    return _utf8(json.dumps(row, ensure_ascii=False)) + b"\n"


def _utf8(text: str) -> bytes:
    r"""As bytes; half a surrogate pair, such as the name of a file may have, as \udcff, which JSON can read."""
    return text.encode(errors="backslashreplace")
