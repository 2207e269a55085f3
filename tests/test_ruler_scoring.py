"""RULER's scores, the command that scores prediction files, and the statistics of a task."""

import json
import math
import subprocess
import sys

import pytest

from eval.records import Sample, TaskScore
from eval.ruler import RulerConfig, RulerSuite
from eval.ruler.score import main
from eval.ruler.scoring import postprocess, score_prediction
from eval.statistics import mean_interval, plain_mean, task_score, wilson_interval
from tests.ruler_tokenizer import build


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "score"),
    [
        ("all", " 12345, 67890", ["12345", "67890"], 1.0),
        ("all", "12345", ["12345", "67890"], 0.5),
        ("part", "12345", ["12345", "67890"], 1.0),
        ("all", "", ["1"], 0.0),
        ("part", "I do not know", ["no"], 1.0),  # a substring is enough, officially
        ("all", "912345", ["12345"], 1.0),
        ("part", "NORMANDY", ["Normandy", "in the Normandy"], 1.0),
        ("part", "france", ["Normandy"], 0.0),
        ("all", "new\x00york", ["new york"], 0.0),  # a control character becomes a newline
        ("all", "new\tyork", ["new\nyork"], 1.0),
        ("all", "a" * 5, ["a", "a", "b"], 2 / 3),
    ],
)
def test_official_score(metric, prediction, references, score):
    assert score_prediction(metric, prediction, references) == score


def test_postprocessing_strips_again_after_control_characters():
    assert postprocess(" \x00 a\x1fb\x7f \x01\n") == "a\nb\x7f"


def test_suite_scores_and_summary(tmp_path):
    suite = RulerSuite(RulerConfig(length=1024, cache_dir=str(tmp_path)), build(), "base", 2048)
    question = Sample("qa_1", 0, "", ("Paris", "the city of Paris"), 32, True)
    assert suite.score(question, "paris.") == 1.0
    assert suite.score(Sample("vt", 0, "", ("AAA", "BBB"), 30, True), "AAA") == 0.5
    tasks, averages = suite.summarize({"vt": [1.0, 1.0, 0.0], "qa_1": [0.0], "fwe": []})
    assert tasks["vt"].score == 66.67
    assert tasks["fwe"] == TaskScore(None, 0, None)
    assert averages == {"average": 33.34}  # of the rounded scores, the third task having none


def write(folder, task, rows):
    (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_command_scores_a_folder(tmp_path):
    write(tmp_path, "vt", [{"pred": "AB", "outputs": ["A", "B"]}, {"pred": "A", "outputs": ["A", "B"], "index": 1}])
    write(tmp_path, "qa_2", [{"pred": "\u0000yes", "outputs": ["Yes"]}] * 2 + [{"pred": "", "outputs": ["no"]}])
    run = subprocess.run([sys.executable, "-m", "eval.ruler.score", str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "result.json").read_text()) == {"vt": 75.0, "qa_2": 66.67}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["qa_2.jsonl", "result.json", "vt.jsonl"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "vt.jsonl: holds no predictions"),
        ("{", "vt.jsonl, line 1: not JSON"),
        ("[1]", "line 1: not a JSON object"),
        ('{"outputs": ["a"]}', "line 1: 'pred' must be a string"),
        ('{"pred": "a"}', "line 1: 'outputs' must be a list"),
        ('{"pred": "a", "outputs": []}', "line 1: 'outputs' must be a list"),
        ('{"pred": "a", "outputs": ["b"]}\n{"pred": 1}', "line 2: 'pred'"),
        (None, "holds no prediction file; expected <task>.jsonl"),
    ],
)
def test_command_says_in_one_line_what_is_wrong(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "vt.jsonl").write_text(content)
    assert main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "result.json").exists()


def test_command_names_a_missing_folder(tmp_path, capsys):
    assert main([str(tmp_path / "absent")]) == 1
    assert "absent: no such folder" in capsys.readouterr().err


def test_wilson_interval_against_published_values():
    # Newcombe (1998), table I, method 3
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert wilson_interval(0, 0) is None
    assert wilson_interval(5, 5)[1] == 1.0


def test_mean_interval_is_students():
    low, high = mean_interval([0.2, 0.4, 0.6])
    half = 4.302652729911275 * 0.2 / math.sqrt(3)  # t quantile of 2 degrees of freedom
    assert (low, high) == pytest.approx((0.4 - half, 0.4 + half))
    assert mean_interval([0.5]) is None


def test_task_score_picks_the_interval():
    assert task_score([1.0, 0.0, 1.0, 1.0]).ci95 == pytest.approx(tuple(100 * p for p in wilson_interval(3, 4)))
    graded = task_score([0.5, 0.75, 1.0])
    assert graded.score == 75.0
    assert graded.ci95[1] == 100.0  # cut to the possible
    assert task_score([0.5]) == TaskScore(50.0, 1, None)
    assert task_score([]) == TaskScore(None, 0, None)
    for bad in (math.nan, -0.1, 1.5):
        with pytest.raises(ValueError, match="not in"):
            task_score([bad])


def test_average_leaves_out_absent_scores():
    assert plain_mean([100.0, None, 50.0]) == 75.0
    assert plain_mean([None]) is None
