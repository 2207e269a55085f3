"""Prediction files of a run, read by the official format's scorer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.longbench.score import score_folder
from experiments.predictions import write_predictions
from tests.longbench_data import row, suite, write

DATASETS = ("trec", "qasper")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in DATASETS:
        for ending in ("", "_e"):
            write(folder, name + ending, *(row(name, i, length=3000 * i) for i in range(4)))
    return folder


@pytest.mark.parametrize("extended", [False, True])
def test_the_scorer_gives_what_the_suite_gives(tmp_path: Path, data: Path, extended: bool) -> None:
    own = suite(data, template="none", tasks=list(DATASETS), extended=extended)
    samples = [sample for task in own.plan().tasks for sample in own.samples(task)]
    rows = {(s.task, s.index): {"prediction": s.references[0] if s.task.startswith("trec") else "no"} for s in samples}
    folder = tmp_path / "predictions"
    write_predictions(folder, own, samples, rows)
    scores = {
        task: [own.score(s, rows[task, s.index]["prediction"]) for s in samples if s.task == task]
        for task in {s.task for s in samples}
    }
    expected = own.summarize(scores)[0]
    result, means = score_folder(folder, extended)
    assert set(result) == set(DATASETS)
    assert sum(means["samples"].values()) == len(samples)
    for task, score in expected.items():
        dataset, _, bucket = task.partition("_e_")
        assert (result[dataset][bucket] if extended else result[dataset]) == pytest.approx(score.score)
    assert max(score.score for score in expected.values()) > 0


def test_unfinished_samples_and_other_suites_leave_no_line(tmp_path: Path, data: Path) -> None:
    own = suite(data, template="none", tasks=["trec"])
    samples = list(own.samples("trec"))
    write_predictions(tmp_path / "none", own, samples, {})
    write_predictions(tmp_path / "none", object(), samples, {("trec", 0): {"prediction": "x"}})
    assert not (tmp_path / "none").exists()
    write_predictions(tmp_path / "one", own, samples, {("trec", 0): {"prediction": "x\ny"}})
    (line,) = (tmp_path / "one" / "trec.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "pred": "x\ny",
        "answers": list(samples[0].references),
        "all_classes": list(samples[0].extra["all_classes"]),
        "length": samples[0].extra["length"],
    }
