"""LongBench prompt texts and limits against the official configuration files."""

import hashlib
import json
from pathlib import Path

import pytest

from eval.longbench.datasets import DATASETS, EXTENDED

OFFICIAL = json.loads((Path(__file__).parent / "golden" / "longbench_prompts.json").read_text(encoding="utf-8"))


def test_datasets_come_in_the_official_set():
    assert set(DATASETS) == set(OFFICIAL)
    assert len(EXTENDED) == 13


@pytest.mark.parametrize("name", DATASETS)
def test_prompt_and_limit_are_official(name):
    dataset = DATASETS[name]
    assert hashlib.sha256(dataset.template.encode()).hexdigest() == OFFICIAL[name]["sha256"]
    assert dataset.max_new_tokens == OFFICIAL[name]["max_new_tokens"]


@pytest.mark.parametrize(
    ("name", "ending"),
    [("passage_count", "is: "), ("passage_retrieval_en", "is: "), ("lcc", "code:\n"), ("repobench-p", "code:\n")],
)
def test_trailing_white_space_survives(name, ending):
    assert DATASETS[name].template.endswith(ending)


def test_raw_and_first_line_sets_are_the_official_ones():
    few_shot = {"trec", "triviaqa", "samsum", "lsht"}
    assert {name for name, d in DATASETS.items() if d.first_line} == few_shot
    assert {name for name, d in DATASETS.items() if not d.chat} == few_shot | {"lcc", "repobench-p"}
    assert {name for name, d in DATASETS.items() if d.stop_strings or d.min_new_tokens} == {"samsum"}


def test_official_sizes_add_up():
    assert sum(d.rows for d in DATASETS.values()) == 4750
    assert [sum(d.category == c for d in DATASETS.values()) for c in ("single_doc_qa", "few_shot", "code")] == [4, 4, 2]
