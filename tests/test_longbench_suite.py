"""LongBench as a suite: plan, LongBench-E, scores, averages."""

import json
from pathlib import Path

import pytest

import eval.longbench.suite
from eval.data import SourceUnavailable
from eval.longbench import LongBenchConfig, official_row
from eval.longbench.datasets import DATASETS, EXTENDED
from eval.longbench.rows import open_source
from eval.records import TaskError, reasons
from tests.longbench_data import row, suite, write, write_all

SHARED = Path(__file__).parents[1] / ".." / "shared" / "data" / "longbench"


@pytest.fixture
def data(tmp_path):
    return write_all(tmp_path)


# --- plan -----------------------------------------------------------------------------------------


def test_plan_counts_and_labels_what_is_missing(data):
    (data / "trec.jsonl").unlink()
    plan = suite(data, template="none", samples=1).plan()
    assert plan.tasks == tuple(name for name in DATASETS if name != "trec")
    assert set(plan.samples_per_task.values()) == {1}
    assert [(s.task, s.source_missing) for s in plan.skipped] == [("trec", True)]
    assert "no trec.jsonl" in plan.skipped[0].reason
    assert "averages are partial: 20 of 21 datasets" in plan.notes
    assert "qasper: 2 rows in the source, 200 in the official set" in plan.notes
    assert not plan.official


def test_full_official_data_are_official(data):
    write(data, "qasper", *(row("qasper", i) for i in range(200)))
    plan = suite(data, template="none", tasks=["qasper"], samples=5).plan()
    assert plan.official
    assert plan.samples_per_task == {"qasper": 5}


def test_plan_without_any_data_skips_everything(monkeypatch):
    def unavailable(name):
        raise SourceUnavailable(name, "no network")

    monkeypatch.setattr(eval.longbench.suite, "resolve", unavailable)
    plan = suite(None).plan()
    assert plan.tasks == ()
    assert len(plan.skipped) == 21
    assert all(skip.source_missing and "no network" in skip.reason for skip in plan.skipped)
    remedy = "or set task.data_dir= to a folder of LongBench's <dataset>.jsonl files, or their data.zip"
    assert reasons(plan.skipped) == f"narrativeqa and 20 others: no data: no network; {remedy}"  # said 21 times


def test_data_that_are_none_are_refused_by_their_key(tmp_path):
    accepted = "accepted: a folder of LongBench's <dataset>.jsonl files, or their data.zip"
    for folder, problem in ((tmp_path / "absent", "does not exist"), (tmp_path, "no LongBench file")):
        with pytest.raises(TaskError) as caught:
            suite(folder).plan()
        assert str(caught.value) == f"task.data_dir={folder}: {problem}; {accepted}"


def test_plan_checks_the_rows_it_will_run(data):
    write(data, "qasper", row("qasper"), row("qasper", answers="Ada"))
    assert suite(data, tasks=["qasper"], samples=1).plan().samples_per_task == {"qasper": 1}
    with pytest.raises(TaskError, match=r"qasper\.jsonl, line 2: field 'answers'"):
        suite(data, tasks=["qasper"]).plan()
    write(data, "qasper")
    with pytest.raises(TaskError, match=r"qasper\.jsonl: holds no rows"):
        suite(data, tasks=["qasper"]).plan()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"tasks": ["qasper", "squad"]}, "task.tasks: 'squad' is not in LongBench; accepted: narrativeqa, "),
        ({"tasks": ["musique"], "extended": True}, "'musique' is not in LongBench-E; accepted: qasper, "),
        ({"tasks": []}, r"task.tasks=\[\]; accepted: a list of dataset names"),
        ({"samples": 0}, "task.samples=0; accepted: an integer from 1"),
        ({"max_input": 1}, "task.max_input=1; accepted: an integer from 2"),
        ({"profile": "paper"}, "task.profile='paper'; accepted: official, ffd_paper"),
        ({"template": "qwen"}, "task.template='qwen'; accepted: auto, none, chat"),
    ],
)
def test_requests_that_are_not_accepted(request_, message):
    with pytest.raises(TaskError, match=message):
        LongBenchConfig(**request_)


# --- LongBench-E ----------------------------------------------------------------------------------


def test_extended_tasks_are_length_buckets(tmp_path):
    lengths = [3999, 4000, 7999, 8000, 20000, 100]
    for name in EXTENDED:
        write(tmp_path, f"{name}_e", *(row(name, i, length=length) for i, length in enumerate(lengths)))
    write(tmp_path, "trec_e", row("trec", length=5000))
    made = suite(tmp_path, extended=True, template="none")
    plan = made.plan()
    assert len(plan.tasks) == 12 * 3 + 1
    assert plan.samples_per_task["qasper_e_0-4k"] == 2
    assert [s.task for s in plan.skipped] == ["trec_e_0-4k", "trec_e_8k+"]
    assert not any(s.source_missing for s in plan.skipped)
    assert [s.extra["length"] for s in made.samples("qasper_e_4-8k")] == [4000, 7999]
    assert [s.index for s in made.samples("qasper_e_8k+")] == [0, 1]
    assert made.samples("qasper_e_8k+")[0].task == "qasper_e_8k+"


def test_extended_summary_names_averages_by_bucket(tmp_path):
    made = suite(tmp_path, extended=True, tasks=["qasper", "lcc"])
    results, means = made.summarize({"qasper_e_0-4k": [0.5, 1.0], "lcc_e_0-4k": [0.25], "lcc_e_8k+": []})
    assert results["qasper_e_0-4k"].score == 75.0
    assert results["lcc_e_8k+"].score is None
    assert means["macro_0-4k"] == 50.0
    assert means["code_0-4k"] == 25.0
    assert means["macro_8k+"] is None


# --- scores ---------------------------------------------------------------------------------------


def test_summary_scores_like_the_official_script(data):
    made = suite(data)
    values = [0.1, 0.2, 1 / 3, 0.0]
    results, means = made.summarize({"qasper": values, "lcc": [1.0, 0.0], "trec": []})
    total = 0.0
    for value in values:
        total += value
    assert results["qasper"].score == round(100 * total / 4, 2)
    assert results["qasper"].n == 4
    low, high = results["lcc"].ci95
    assert low < 50.0 < high
    assert results["trec"].score is None
    assert means["macro"] == round((results["qasper"].score + 50.0) / 2, 2)
    assert means["few_shot"] is None
    with pytest.raises(TaskError, match="task 'squad' is not part of this run"):
        made.summarize({"squad": [1.0]})


def test_scores_follow_the_first_line_rule(data):
    made = suite(data, tasks=["trec", "qasper"])
    sample = made.samples("trec")[0]
    assert made.score(sample, "\nHuman\nDate") == 1.0
    assert made.score(sample, "Human Date") == 0.5
    assert made.score(sample, "") == 0.0


def test_official_row_has_the_prompt_and_the_answer_fields(data):
    made = suite(data, tasks=["trec"])
    sample = made.samples("trec")[0]
    assert json.loads(json.dumps(official_row(sample))) == {
        "prompt": sample.prompt,
        "answers": ["Human"],
        "all_classes": ["Human", "Date"],
        "length": 10,
        "_id": "trec-0",
    }


def test_shared_rows_run_through_the_suite():
    if not SHARED.is_dir():
        pytest.skip("../shared/data/longbench is not here: official rows are not part of the project")
    made = suite(SHARED, samples=2, template="none")
    plan = made.plan()
    assert plan.tasks == ("multifieldqa_zh", "multi_news", "passage_retrieval_zh")
    assert len(plan.skipped) == 18
    for task in plan.tasks:
        for sample in made.samples(task):
            assert sample.truncated  # a byte tokenizer makes every row long
            assert made.score(sample, sample.references[0]) > 0.99


def test_samples_name_the_document_that_they_share(data):
    made = suite(data, tasks=["trec"])
    documents = {sample.extra["document"] for sample in made.samples("trec")}
    contexts = {row.context for row in open_source(data).read("trec")}
    assert len(documents) == len(contexts)
