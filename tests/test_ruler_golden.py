"""RULER prompts against recorded hashes of the official generators' outputs (see golden/record_ruler.py)."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest

from eval.ruler import TASKS, RulerConfig, RulerSuite, official_row
from tests.ruler_data import require
from tests.ruler_tokenizer import build, load_smollm2

GOLDEN = json.loads((Path(__file__).parent / "golden/ruler.json").read_text())
SOURCES = ("ruler/essays", "ruler/squad", "ruler/hotpotqa", "nltk/punkt_tab")


def digest(suite, task):
    rows = [official_row(sample) for sample in suite.samples(task)]
    content = [[row["input"] + row["answer_prefix"], row["outputs"], row["length"]] for row in rows]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def global_states():
    return random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - the one that must stay untouched


@pytest.fixture(scope="module")
def tokenizers():
    require("model/smollm2_135m", *SOURCES)
    return {"pieces": build(), "smollm2": load_smollm2()}


@pytest.mark.parametrize("case", GOLDEN["hashes"])
def test_prompts_answers_and_lengths_are_the_official_ones(case, tokenizers, tmp_path):
    tokenizer, template, length = case.split("/")
    config = RulerConfig(length=int(length), samples=GOLDEN["samples"], template=template, cache_dir=str(tmp_path))
    suite = RulerSuite(config, tokenizers[tokenizer], "unknown", 2**20)
    assert suite.plan().tasks == tuple(TASKS)
    assert suite.plan().official
    before = global_states()
    assert {task: digest(suite, task) for task in TASKS} == GOLDEN["hashes"][case]
    assert global_states() == before


def test_golden_covers_two_lengths_two_templates_and_every_task():
    for case in ("pieces/base/4096", "pieces/base/8192", "pieces/meta-llama3/4096", "pieces/meta-llama3/8192"):
        assert list(GOLDEN["hashes"][case]) == list(TASKS)
