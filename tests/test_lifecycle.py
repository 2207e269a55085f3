"""The one life cycle of all runners, on a run that does nothing but keep rows."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.errors import INVALID_EXIT, RunFailedError, UsageError
from experiments.lifecycle import StudyRun
from experiments.store import RunStore
from ffd.support import UnsupportedModelError

IDENTITY = {"method": {"name": "dense"}, "task": {"name": "toy"}, "tuple": (1, 2)}
ROWS = 3


class Toy(StudyRun):
    """Keeps three rows; ``before`` is called before each, ``own`` is the summary's block."""

    def __init__(self, root, before=lambda index: None, own=None, **options):
        config = SimpleNamespace(root=root, rerun=False, dry_run=False, tracker="none", runner="toy", **options)
        super().__init__(config, IDENTITY)
        self.before, self.own = before, own or {}

    def plan(self, done):
        return f"{ROWS - len(done)} rows"

    def work(self, rows, tracker):
        for index in range(ROWS):
            if ("toy", index) not in rows:
                self.before(index)
                row = {"task": "toy", "index": index}
                self.store.append_sample(row)
                rows["toy", index] = row

    def summarize(self, rows):
        return {"rows": len(rows), **self.own}

    def write_results(self, rows, summary):
        stored = json.loads((self.store.folder / "summary.json").read_text())
        assert stored["status"] == "partial"  # a kill from here on does not leave a run that calls itself complete
        self.store.write_text("results.txt", str(len(rows)))

    def show(self, summary):
        print(summary["status"])


def fail(error, at=1):
    """Raise ``error`` before row ``at``."""

    def before(index):
        if index == at:
            raise error

    return before


def summary(root: Path) -> dict:
    (path,) = root.glob("runs/*/summary.json")
    return json.loads(path.read_text())


def test_a_run_that_ends_is_complete_and_shown_again_without_reading_its_rows(tmp_path, monkeypatch):
    assert Toy(tmp_path).run() == 0
    assert (summary(tmp_path)["status"], summary(tmp_path)["rows"]) == ("complete", ROWS)
    (folder,) = (tmp_path / "runs").iterdir()
    assert {p.name for p in folder.iterdir()} == {
        ".lock", "config.yaml", "environment.json", "results.txt", "samples.jsonl", "summary.json",
    }  # fmt: skip
    monkeypatch.setattr(RunStore, "finished_samples", None)
    assert Toy(tmp_path).run() == 0


def test_rows_are_read_once(tmp_path, monkeypatch):
    calls = []
    honest = RunStore.finished_samples
    monkeypatch.setattr(RunStore, "finished_samples", lambda self: calls.append(1) or honest(self))
    assert Toy(tmp_path).run() == 0
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("own", "status", "code"),
    [
        ({"problem": "counters disagree", "lacking": "data"}, "invalid", INVALID_EXIT),
        ({"lacking": "no data for vt"}, "partial", 0),
    ],
)
def test_a_run_that_ends_may_be_invalid_or_partial(tmp_path, own, status, code):
    assert Toy(tmp_path, own=own).run() == code
    stored = summary(tmp_path)
    assert (stored["status"], stored["reason"]) == (status, next(iter(own.values())))
    assert not own.keys() & stored.keys()


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [
        (RuntimeError("the power went out"), RunFailedError, "failed"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RunFailedError, "failed"),
        (UnsupportedModelError("model type x: no"), UsageError, "failed"),
        (KeyboardInterrupt(), KeyboardInterrupt, "partial"),
    ],
)
def test_what_stops_a_run_is_recorded_and_the_same_command_resumes(tmp_path, error, raised, status):
    with pytest.raises(raised):
        Toy(tmp_path, fail(error)).run()
    stored = summary(tmp_path)
    assert (stored["status"], stored["rows"]) == (status, 1)
    assert status == "partial" or str(error) in stored["reason"]
    assert not list(tmp_path.rglob(".reserve")) or status == "partial"
    assert Toy(tmp_path, fail(AssertionError("row 0 again"), at=0)).run() == 0


def test_what_cannot_begin_leaves_nothing_and_what_fails_at_once_is_kept(tmp_path):
    with pytest.raises(UsageError, match="model type x"):
        Toy(tmp_path, fail(UnsupportedModelError("model type x: no"), at=0)).run()
    assert list((tmp_path / "runs").iterdir()) == []
    killed = Toy(tmp_path)
    killed._open({})  # what a kill before the refusal leaves
    killed.store.close()
    with pytest.raises(UsageError, match="model type x"):
        Toy(tmp_path, fail(UnsupportedModelError("model type x: no"), at=0)).run()
    assert list((tmp_path / "runs").iterdir()) == []
    with pytest.raises(RunFailedError, match="out of memory"):
        Toy(tmp_path, fail(RuntimeError("out of memory"), at=0)).run()
    assert summary(tmp_path)["reason"] == "RuntimeError: out of memory"


def test_a_disk_too_full_to_record_its_own_failure_is_said_so(tmp_path, monkeypatch, capsys):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    toy = Toy(tmp_path, fail(full))
    honest = RunStore.write_json

    def write_json(self, name, value):
        if name == "summary.json" and value["status"] == "failed":
            raise full
        honest(self, name, value)

    monkeypatch.setattr(RunStore, "write_json", write_json)
    with pytest.raises(RunFailedError, match="No space left"):
        toy.run()
    assert "could not be recorded" in capsys.readouterr().err
    assert summary(tmp_path)["status"] == "partial"


def test_a_disk_without_room_for_the_traceback_still_records_the_failure(tmp_path, monkeypatch, capsys):
    """Once the traceback was written first, and named where it was not."""

    def full(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunStore, "write_traceback", full)
    with pytest.raises(RunFailedError) as raised:
        Toy(tmp_path, fail(KeyError("heads"))).run()
    assert str(raised.value).endswith("KeyError: 'heads'; finished samples are kept")
    assert "could not be recorded in full (No space left on device)" in capsys.readouterr().err
    stored = summary(tmp_path)
    assert (stored["status"], stored["reason"]) == ("failed", "KeyError: 'heads'")


def test_a_failure_that_is_no_text_is_recorded(tmp_path):
    """A file's name may hold bytes that are not UTF-8. Once the error was the record's own, and the run partial."""
    with pytest.raises(RunFailedError, match="finished samples are kept"):
        Toy(tmp_path, fail(RuntimeError("caf\udce9.txt"))).run()
    stored = summary(tmp_path)
    assert (stored["status"], stored["reason"]) == ("failed", "RuntimeError: caf\udce9.txt")
    (traceback,) = tmp_path.glob("runs/*/traceback.txt")
    assert r"RuntimeError: caf\udce9.txt" in traceback.read_text()
