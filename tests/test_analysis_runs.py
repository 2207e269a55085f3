"""The list of runs: figures of one set of samples, methods told apart, and what each runner found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.listing import NUMBERS, TEXTS, cells
from analysis.load import load
from tests.analysis_outputs import write_run

DENSE = {"name": "dense"}
COLUMNS = (*TEXTS, *NUMBERS, "reason")
KILLED: dict[str, Any] = {"status": "partial", "reason": "not finished: running, or killed"}


def shown(out: Path, run_id: str) -> dict[str, str]:
    return dict(zip(COLUMNS, cells(load(out).runs[run_id]), strict=True))


def add_ledgers(folder: Path, kept: float) -> None:
    """Give every sample a ledger of one layer that loads this share."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    layer = {"context": 100.0, "union": [100 * kept] * 2, "bytes_read": {"keys": 40.0}, "dense_bytes": 80.0}
    for row in rows:
        row["ledger"] = {"sliding_context": 0, "layers": [layer]}
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("before", "averaged"),
    [({"average": None}, {}), ({"vt": {"score": 0.0, "n": 1}, "average": 0.0}, {"average": 1})],
    ids=["killed at its first start", "resumed, then killed"],
)
def test_a_killed_run_has_the_figures_of_the_samples_it_finished(tmp_path, before, averaged):
    # The score was that of the summary, of one sample or none, beside the n of samples.jsonl.
    stale = {"accuracy": before, "average_samples": averaged, "sparsity": {"keep_io": 1.0, "bytes_ratio": 1.0}}
    scores = {"vt": [0.0, 1.0], "cwe": [0.25, 0.5, 0.75]}
    add_ledgers(write_run(tmp_path, "cut-1", DENSE, scores, **KILLED, **stale), kept=0.25)
    row = shown(tmp_path, "cut-1")
    assert (row["score"], row["n"], row["keep_io"], row["bytes"]) == ("50.00", "5", "0.250", "0.500")


def test_a_killed_longbench_run_has_the_mean_of_its_categories(tmp_path):
    scores = {"qasper": [1.0], "narrativeqa": [0.0], "trec": [1.0, 1.0]}
    write_run(tmp_path, "cut-1", DENSE, scores, task={"name": "longbench"}, accuracy={"macro": 3.0}, **KILLED)
    assert shown(tmp_path, "cut-1")["score"] == "75.00"


def test_a_sample_without_a_score_leaves_a_killed_run_without_an_average(tmp_path):
    folder = write_run(tmp_path, "cut-1", DENSE, {"vt": [1.0, 1.0]}, **KILLED)
    (folder / "samples.jsonl").write_text(
        (folder / "samples.jsonl").read_text().replace('"score": 1.0', '"score": null', 1)
    )
    assert (shown(tmp_path, "cut-1")["score"], shown(tmp_path, "cut-1")["n"]) == ("-", "2")


def test_a_finished_run_has_its_summarys_figures_and_its_n(tmp_path):
    folder = write_run(tmp_path, "dense-1", DENSE, {"vt": [1.0, 0.0]})
    (folder / "samples.jsonl").write_text("")  # lost since
    assert (shown(tmp_path, "dense-1")["score"], shown(tmp_path, "dense-1")["n"]) == ("50.00", "2")


@pytest.mark.parametrize("ledger", [3, {"layers": 1}, {"sliding_context": 0, "layers": [{"union": []}]}])
def test_a_ledger_of_another_form_hides_no_run(tmp_path, ledger):
    folder = write_run(tmp_path, "cut-1", DENSE, {"vt": [1.0]}, **KILLED)
    row = json.loads((folder / "samples.jsonl").read_text()) | {"ledger": ledger}
    (folder / "samples.jsonl").write_text(json.dumps(row) + "\n")
    assert (shown(tmp_path, "cut-1")["score"], shown(tmp_path, "cut-1")["keep_io"]) == ("100.00", "-")
