"""The list of runs: figures of one set of samples, methods told apart, and what each runner found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from analysis import __main__ as command
from analysis.labels import distinct_labels
from analysis.listing import NUMBERS, REMARKS, TEXTS, rows
from analysis.load import load
from tests.analysis_outputs import write_run

DENSE = {"name": "dense"}
COLUMNS = (*TEXTS, *NUMBERS, *REMARKS)
KILLED: dict[str, Any] = {"status": "partial", "reason": "not finished: running, or killed"}


def shown(out: Path, run_id: str) -> dict[str, str]:
    return dict(zip(COLUMNS, next(row for row in rows(list(load(out).runs.values())) if row[0] == run_id), strict=True))


def add_ledgers(folder: Path, kept: float) -> None:
    """Give every sample a ledger of one layer that loads this share."""
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    layer = {"context": 100.0, "union": [100 * kept] * 2, "bytes_read": {"keys": 40.0}, "dense_bytes": 80.0}
    for sample in samples:
        sample["ledger"] = {"sliding_context": 0, "layers": [layer]}
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


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


def test_runs_of_one_method_are_told_apart_by_the_knobs_they_differ_in(tmp_path, capsys):
    # "stride" three times, in the list, the comparison and the report.
    for every in (1, 2, 8):
        write_run(tmp_path, f"s-{every}", {"name": "mine:Stride", "every": every, "sinks": 4}, {"vt": [1.0, 0.0]})
    write_run(tmp_path, "s-default", {"name": "mine:Stride", "sinks": 4}, {"vt": [1.0, 0.0]})
    write_run(tmp_path, "o-1", {"name": "other"}, {"vt": [1.0]})
    labels = ["Stride every=1", "Stride every=2", "Stride every=8"]
    assert [shown(tmp_path, f"s-{every}")["method"] for every in (1, 2, 8)] == labels
    assert shown(tmp_path, "s-default")["method"] == "Stride"
    for arguments, told in ((["runs"], labels), (["compare", "s-1", "s-8"], [labels[0], labels[2]])):
        assert command.main([*arguments, "--out", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert all(text in said for text in told)
    assert command.main(["report", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "analysis" / "report.html").read_text()
    assert all(f"<td>{text}</td>" in page for text in labels)


def test_methods_of_one_short_name_have_their_modules_too():
    labels = distinct_labels([{"name": "a:Stride", "every": 2}, {"name": "b:Stride", "every": 2}, DENSE], whole=True)
    assert labels == ["a:Stride", "b:Stride", "dense"]


def test_margins_of_a_calibration_are_told_by_a_digest():
    margins = [[6.5] * 14] * 24
    first, second = distinct_labels([{"name": "ffd", "deltas": None}, {"name": "ffd", "deltas": margins}], whole=True)
    assert first == "ffd"
    assert re.fullmatch(r"ffd deltas=#[0-9a-f]{6}", second)


def of_runner(out: Path, run_id: str, runner: str, **blocks: Any) -> dict[str, str]:
    folder = write_run(
        out, run_id, {"name": "ffd", "delta": 7.0}, {"vt": [1.0, 0.0]}, accuracy=None, average_samples=None, **blocks
    )
    (folder / "config.yaml").write_text(f"runner: {runner}\n")
    samples = [{"task": "vt", "index": 0}, {"task": "vt", "index": 1}]
    if runner == "calibrate":
        samples.append({"task": "calibration", "index": 0})  # its result, not a prompt
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return shown(out, run_id)


@pytest.mark.parametrize(
    ("runner", "blocks", "told"),
    [
        ("fidelity", {"forced": {"kl_mean": 0.0019}, "timing": {"prompts": 2}}, "mass recall 0.9700, KL 0.00190"),
        (
            "fidelity",
            {"forced": {"kl_mean": 0.0019}, "timing": {"prompts": 1}, **KILLED},
            "mass recall 0.9700, KL 0.00190 (of 1 prompt)",
        ),
        (
            "calibrate",
            {
                "calibrate": {"target": "mass_recall", "value": 0.95, "per": "head"},
                "calibrated": {"reached": 0.99, "pairs_meeting": 1.0},
                "held_out": {"reached": 0.9862, "pairs_meeting": 0.738},
            },
            "mass recall 0.9862 held out (asked 0.95 per head, met by 74 % of pairs)",
        ),
        (
            "calibrate",
            {
                "calibrate": {"target": "bytes_ratio", "value": 0.3, "per": "layer"},
                "calibrated": {"reached": 0.29, "pairs_meeting": None},
                "held_out": None,
            },
            "bytes ratio 0.2900 on its own prompts (asked 0.3 per layer)",
        ),
        ("calibrate", {"calibrate": {"target": "mass_recall"}, "calibrated": None, **KILLED}, ""),
        (
            "fidelity",
            {"points": [{"keep_io": 0.1, "mass_recall": 0.9}, {"keep_io": 0.3, "mass_recall": None}]},
            "2 points, kept 0.100 to 0.300, mass recall 0.9000",
        ),
    ],
    ids=["fidelity", "fidelity, killed", "calibrate", "nothing held out", "calibrate, killed", "replay"],
)
def test_a_run_without_a_score_says_what_it_found(tmp_path, runner, blocks, told):
    row = of_runner(tmp_path, "f-1", runner, **blocks)
    assert (row["runner"], row["score"], row["n"], row["what it found"]) == (runner, "-", "2", told)


def test_a_run_that_broke_laws_or_is_invalid_says_so(tmp_path):
    laws = [{"law": "recall in [0, 1]", "holds": False}, {"law": "finite", "holds": True}]
    row = of_runner(tmp_path, "f-1", "fidelity", laws=laws, laws_broken=1)
    assert (row["status"], row["what is wrong"]) == ("complete", "broke 1 law: recall in [0, 1]")
    laws[1]["holds"] = False
    void = {"status": "invalid", "reason": "a prediction was not finite"}
    row = of_runner(tmp_path, "f-2", "fidelity", laws=laws, laws_broken=2, **void)
    assert row["status"] == "invalid"
    assert row["what is wrong"] == "broke 2 laws: recall in [0, 1] and 1 more; a prediction was not finite"
    assert command.main(["report", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "analysis" / "report.html").read_text()
    assert '<td class="mark">broke 1 law: recall in [0, 1]</td>' in page
