"""``python -m eval.longbench.score``: official result files from official-format predictions."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from eval.longbench.averages import averages, members
from eval.longbench.datasets import DATASETS, EXTENDED
from eval.longbench.score import main

GOLDEN = json.loads((Path(__file__).parent / "golden" / "longbench_scores.json").read_text(encoding="utf-8"))


def write_predictions(folder: Path, name: str, **changes: object) -> None:
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for row, length in zip(GOLDEN[name]["rows"], GOLDEN[name]["lengths"], strict=True):
            line = {"pred": row["prediction"], "answers": row["answers"], "all_classes": row.get("all_classes")}
            file.write(json.dumps(line | {"length": length} | changes, ensure_ascii=False) + "\n")


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_all_datasets_give_the_official_result(tmp_path, capsys):
    for name in DATASETS:
        write_predictions(tmp_path, name)
    assert main([str(tmp_path)]) == 0
    result, means = load(tmp_path / "result.json"), load(tmp_path / "averages.json")
    assert result == {name: case["score"] for name, case in GOLDEN.items()}
    assert not means["partial"]
    assert means["missing"] == []
    assert means["averages"]["flat"] == round(sum(result.values()) / 21, 2)
    # The official layout: four spaces, no newline at the end.
    assert (tmp_path / "result.json").read_text(encoding="utf-8") == json.dumps(result, ensure_ascii=False, indent=4)
    assert capsys.readouterr().err == ""


def test_a_subset_is_labelled_partial(tmp_path):
    write_predictions(tmp_path, "trec")
    write_predictions(tmp_path, "lcc")
    assert main([str(tmp_path)]) == 0
    means = load(tmp_path / "averages.json")
    assert means["partial"]
    assert set(means["missing"]) == set(DATASETS) - {"trec", "lcc"}
    assert means["samples"] == {"trec": 10, "lcc": 11}
    assert means["averages"]["macro"] == round((GOLDEN["trec"]["score"] + GOLDEN["lcc"]["score"]) / 2, 2)
    assert means["averages"]["synthetic"] is None


def test_extended_scores_by_bucket(tmp_path):
    for name in EXTENDED:
        write_predictions(tmp_path, name)
    assert main([str(tmp_path), "--e"]) == 0
    assert load(tmp_path / "result.json") == {name: GOLDEN[name]["by_bucket"] for name in EXTENDED}
    assert set(load(tmp_path / "averages.json")["averages"]) == {"0-4k", "4-8k", "8k+"}


def test_an_empty_bucket_is_nan_as_official(tmp_path):
    write_predictions(tmp_path, "qasper", length=5000)
    assert main([str(tmp_path), "--e"]) == 0
    scores = load(tmp_path / "result.json")["qasper"]
    assert math.isnan(scores["0-4k"])
    assert scores["4-8k"] == GOLDEN["qasper"]["score"]
    assert load(tmp_path / "averages.json")["averages"]["0-4k"]["macro"] is None


def test_classes_are_those_of_the_last_line(tmp_path):
    lines = [
        {"pred": "b", "answers": ["b"], "all_classes": ["b"]},
        {"pred": "a", "answers": ["a"], "all_classes": ["a"]},
    ]
    (tmp_path / "trec.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main([str(tmp_path)]) == 0
    assert load(tmp_path / "result.json") == {"trec": 50.0}


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        ("notes.jsonl", "{}", [], "'notes' is no dataset to score"),
        ("dureader.jsonl", "{}", ["--e"], "'dureader' is no dataset to score"),
        ("qasper.jsonl", "", [], "no prediction; accepted: at least one line"),
        ("qasper.jsonl", '{"pred": "x"}', [], "line 1: field 'answers' is missing"),
        (
            "qasper.jsonl",
            '{"pred": 3, "answers": [], "all_classes": null}',
            [],
            "field 'pred' is 3; accepted: a string",
        ),
        ("qasper.jsonl", '{"pred": "", "answers": [], "all_classes": null}', ["--e"], "field 'length' is missing"),
        ("trec.jsonl", '{"pred": "", "answers": [], "all_classes": null}', [], "field 'all_classes' is null"),
        (
            "passage_retrieval_en.jsonl",
            '{"pred": "3", "answers": ["3"], "all_classes": null}',
            [],
            "passage_retrieval_en.jsonl: answer '3' names no paragraph",
        ),
    ],
)
def test_faults_are_one_line_and_leave_no_result(tmp_path, capsys, name, content, arguments, message):
    (tmp_path / name).write_text(content)
    assert main([str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "result.json").exists()


def test_folders_without_predictions(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no prediction file" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 2
    assert "absent: cannot be read" in capsys.readouterr().err


def test_module_runs_from_the_command_line(tmp_path):
    write_predictions(tmp_path, "multifieldqa_zh")
    command = [sys.executable, "-m", "eval.longbench.score", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["scores"] == {"multifieldqa_zh": GOLDEN["multifieldqa_zh"]["score"]}


def test_an_average_knows_its_datasets():
    names = ["qasper", "multi_news", "vcsum", "lcc"]
    found = members(names)
    assert found["summarization"] == ["multi_news", "vcsum"]
    assert found["multi_doc_qa"] == []
    assert found["macro"] == found["flat"] == names
    assert found["flat_en"] == ["qasper", "multi_news", "lcc"]
    assert found["macro_zh"] == ["vcsum", "lcc"]
    assert members(["lcc"])["flat_zh"] == []  # code alone is no language
    scores = dict.fromkeys(names, 50.0)
    assert {name for name, own in found.items() if own} == {
        n for n, mean in averages(scores).items() if mean is not None
    }
