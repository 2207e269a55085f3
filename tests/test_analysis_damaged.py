"""Damaged and foreign files under an outputs folder: one line each, whatever command meets them; no other is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis import __main__ as command
from analysis.load import load
from analysis.performance import KERNEL, THROUGHPUT, write_measurements
from tests.analysis_outputs import write_run

COMMANDS = ("runs", "tables", "figures", "report")
KERNEL_ROW = {"method": "ffd", "B": 1, "T": 4032, "time_us": 1.0, "step": ["attend", "reduce"]}
STEP_ROW = {
    "method": "ffd", "protocol": "fair", "B": 1, "T": 512, "kept": 0.2,
    "tokens_per_second": 10.0, "ms_per_step": 100.0, "over_floor": 2.0,
}  # fmt: skip


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write_run(tmp_path, "dense-1", {"name": "dense"}, {"vt": [1.0, 0.0, 1.0]})
    write_run(tmp_path, "odd-1", {"name": "ffd"}, {"vt": [1.0, 0.0, 1.0]})
    return tmp_path


def change(out: Path, **blocks: Any) -> None:
    path = out / "runs" / "odd-1" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | blocks))


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ({"method": ["name"]}, "summary.json names no method"),
        ({"method": {"name": 3}}, "summary.json names no method"),
        ({"model": "qwen"}, "model of summary.json is no mapping"),
        ({"task": "ruler"}, "task of summary.json is no mapping"),
        ({"environment": "gpu"}, "environment of summary.json is no mapping"),
        ({"accuracy": 50.0}, "accuracy of summary.json is no mapping"),
        ({"rows": {"a": 1}}, "rows of summary.json is no list"),
        ({"rows": [1]}, "row 0 of rows in summary.json is no mapping"),
        ({"break_even": [1]}, "row 0 of break_even in summary.json is no mapping"),
        ({"rows": [KERNEL_ROW, KERNEL_ROW | {"T": "x"}]}, "row 1 of rows in summary.json has T=x, expected a number"),
        ({"rows": [KERNEL_ROW | {"time_us": float("nan")}]}, "has time_us=nan, expected a number"),
        ({"rows": [{k: v for k, v in KERNEL_ROW.items() if k != "step"}]}, "has no step"),
        ({"rows": [STEP_ROW | {"tokens_per_second": "fast"}]}, "has tokens_per_second=fast, expected a number"),
        ({"points": 3}, "points of summary.json is no list"),
        ({"laws": ["finite"]}, "row 0 of laws in summary.json is no mapping"),
        ({"calibrate": [1]}, "calibrate of summary.json is no mapping"),
        ({"rows": [STEP_ROW | {"protocol": None}]}, "has protocol=None, expected a name"),
    ],
)
def test_a_summary_of_another_form_is_skipped_with_a_line(out, blocks, said, capsys):
    # Each ended the command with a traceback, and one damaged run hid all others.
    change(out, **blocks)
    for name in COMMANDS:
        assert command.main([name, "--out", str(out)]) == 0
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert captured.err.startswith("skipped runs/odd-1: ")
        assert said in captured.err
    assert list(load(out).runs) == ["dense-1"]


def test_timed_rows_as_runners_write_them_are_read(out):
    change(out, rows=[KERNEL_ROW, STEP_ROW, {"anything": None}])
    assert len(load(out).runs["odd-1"].rows) == 3


def test_a_damaged_sample_does_not_take_those_after_it_along(out):
    # The run store reads on; the analysis stopped there, and compared fewer samples without a word.
    path = out / "runs" / "odd-1" / "samples.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{torn", '{"task": [1], "index": 0}', lines[2]]) + "\n")
    assert sorted(load(out).runs["odd-1"].samples) == [("vt", 0), ("vt", 2)]


@pytest.mark.parametrize(("key", "value"), [("score", None), ("score", float("nan")), ("prompt_fingerprint", 3)])
def test_samples_that_cannot_be_compared_are_named(out, key, value, capsys):
    path = out / "runs" / "odd-1" / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1][key] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command.main(["compare", "dense-1", "odd-1", "--out", str(out)]) == 2
    assert f"error: odd-1: sample vt 1 has {'no ' if key != 'score' else ''}{key}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes", [{"overrides": [1]}, {"overrides": None}, {"run_id": ["x"]}, {"reason": {"a": 1}}], ids=str
)
def test_a_sweep_of_another_form_is_skipped_with_a_line(out, changes, capsys):
    job = {"overrides": ["method=ffd"], "run_id": "odd-1", "status": "complete", "reason": None, **changes}
    record = {"name": "x", "experiment": "ruler_32k", "size": "small", "jobs": [job]}
    (out / "sweeps").mkdir(exist_ok=True)
    (out / "sweeps" / "x.json").write_text(json.dumps(record))
    for name in COMMANDS:
        assert command.main([name, "--out", str(out)]) == 0
    assert capsys.readouterr().err.count("skipped sweeps/x.json") == len(COMMANDS)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not readable as JSON"),
        (json.dumps({"rows": [KERNEL_ROW | {"B": None}]}), "row 0 of rows has B=None, expected a number"),
    ],
)
def test_a_damaged_record_of_ones_own_is_named_and_no_other_shown_instead(out, content, said, capsys):
    (out / "measurements").mkdir()
    (out / "measurements" / "mine.json").write_text(content)
    assert command.main(["tables", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "mine.json" in error
    assert said in error


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"gpu": "x", "revision": "r", "date": "d", "rows": [3]}'])
def test_a_damaged_committed_record_leaves_every_document_as_it_was(tmp_path, content):
    records = tmp_path / "records"
    records.mkdir()
    for name in (KERNEL, THROUGHPUT):
        (records / name).write_text(content)
    with pytest.raises(ValueError, match=KERNEL):
        write_measurements(tmp_path, records)
    assert [path.name for path in tmp_path.iterdir()] == ["records"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["r", "odd-1", "--date", "yesterday"], "date=yesterday: expected a day"),
        (["r", "odd-1", "odd-1", "--date", "2026-01-01"], "odd-1 is named 2 times"),
        (["../r", "odd-1", "--date", "2026-01-01"], "../r: expected a name without a folder"),
        (["r", "dense-1", "--date", "2026-01-01"], "dense-1: environment.json cannot be read"),
    ],
)
def test_a_record_that_cannot_be_made_is_one_line(out, arguments, said, capsys):
    machine = {"device": "cpu", "versions": {}, "python": "3", "cuda": None, "git": {"commit": None}}
    (out / "runs" / "odd-1" / "environment.json").write_text(json.dumps(machine))
    (out / "runs" / "dense-1" / "environment.json").write_text(json.dumps(machine | {"git": None}))
    assert command.main(["record", *arguments, "--out", str(out), "--folder", str(out / "new")]) == 2
    assert said in capsys.readouterr().err
    assert not (out / "new").exists()


def test_a_records_folder_is_made_and_a_file_in_its_place_is_one_line(out, capsys):
    machine = {"device": "cpu", "versions": {}, "python": "3", "cuda": None, "git": {"commit": None}}
    (out / "runs" / "odd-1" / "environment.json").write_text(json.dumps(machine))
    given = ["record", "r", "odd-1", "--date", "2026-01-01", "--out", str(out), "--folder"]
    assert command.main([*given, str(out / "new")]) == 0
    assert (out / "new" / "r.json").exists()
    assert command.main([*given, str(out / "new" / "r.json")]) == 2
    assert "cannot be read or written" in capsys.readouterr().err
