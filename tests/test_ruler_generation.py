"""RULER's generators: templates and BOS, word lists, the cache of prompts, rows of official files."""

import json
import random
from collections import Counter

import pytest

from eval import data
from eval.records import TaskError
from eval.ruler import RulerConfig, RulerSuite, official_row, planning
from eval.ruler import suite as suite_module
from eval.ruler.essays import official_order, starts_officially
from eval.ruler.fitting import Setting
from eval.ruler.tasks import COMMON_WORDS_PROMPT, CommonWordsTask
from eval.ruler.templates import resolve_template
from eval.ruler.tokens import TokenCounter
from eval.ruler.word_lists import CommonWordsGenerator
from eval.ruler.words import AdjectiveNounPairs
from tests.ruler_data import require
from tests.ruler_tokenizer import BOS, build, load_smollm2

LLAMA3_CHAT = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
FAST_TASKS = ("niah_single_1", "vt", "fwe")


@pytest.fixture(scope="module")
def pieces():
    tokenizer = build()
    tokenizer.chat_template = LLAMA3_CHAT
    return tokenizer


def make(tokenizer, folder, **options):
    config = RulerConfig(**{"length": 1024, "samples": 3, "cache_dir": str(folder), **options})
    return RulerSuite(config, tokenizer, "llama3", 2**20)


@pytest.mark.parametrize("template", ["base", "meta-llama3", "chat", "Phi3"])
@pytest.mark.parametrize("task", FAST_TASKS)
def test_one_bos_and_the_counted_length_within_the_budget(pieces, tmp_path, template, task):
    suite = make(pieces, tmp_path, template=template)
    for sample in suite.samples(task):
        ids = suite.encode(sample)
        assert ids.count(pieces.bos_token_id) == 1
        assert ids[0] == pieces.bos_token_id
        assert len(ids) == sample.extra["prompt_tokens"]
        counted = len(pieces.tokenize(sample.prompt))
        assert counted + sample.max_new_tokens <= 1024
        assert sample.add_special_tokens == (template in ("base", "Phi3"))
        if template != "chat":
            assert counted + sample.max_new_tokens == sample.extra["length"]


def test_model_without_bos_gets_none(tmp_path):
    require("model/smollm2_135m")
    tokenizer = load_smollm2()
    suite = make(tokenizer, tmp_path, template="base")
    for sample in suite.samples("niah_single_1"):
        assert tokenizer.bos_token_id not in suite.encode(sample)
        assert len(suite.encode(sample)) == sample.extra["prompt_tokens"]
    chat = make(tokenizer, tmp_path, template="chat")
    for sample in chat.samples("niah_single_1"):
        turns = sample.prompt.count(tokenizer.bos_token)  # SmolLM2's BOS text opens each turn
        assert chat.encode(sample).count(tokenizer.bos_token_id) == turns == 3


def test_common_words_example_repeats_the_official_template(pieces, tmp_path):
    (sample, *_) = make(pieces, tmp_path, template="meta-llama3").samples("cwe")
    assert sample.prompt.count("Below is a numbered list") == 2
    assert sample.prompt.count(BOS) == 2  # the benchmark's own text


def test_own_template_is_an_extension_with_the_answer_prefix_after_its_header(pieces, tmp_path):
    suite = make(pieces, tmp_path, template="chat", tasks=("niah_single_1",))
    plan = suite.plan()
    assert not plan.official
    assert any("extension" in note for note in plan.notes)
    overhead = len(pieces.tokenize(suite.template.text))
    for sample in suite.samples("niah_single_1"):
        assert sample.prompt.startswith(f"{BOS}<|start_header_id|>user")
        assert sample.prompt.endswith("assistant<|end_header_id|>\n\n" + sample.extra["answer_prefix"])
        assert sample.extra["length_w_model_temp"] == sample.extra["length"] + overhead <= 1024


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama3", "meta-llama3"), ("llama", "meta-llama3"), ("Phi3", "Phi3"), ("qwen2", "base"), ("mistral", "base")],
)
def test_automatic_template_is_the_familys(pieces, family, name):
    assert resolve_template("auto", family, pieces).name == name


def test_own_template_needs_a_tokenizer_that_has_one():
    with pytest.raises(TaskError, match=r"task.template='chat'"):
        resolve_template("chat", "llama3", build())


def test_official_row_is_the_prompt_in_two_parts(pieces, tmp_path):
    suite = make(pieces, tmp_path, template="meta-llama3")
    for task in ("niah_single_1", "vt"):
        for sample in suite.samples(task):
            row = official_row(sample)
            assert row["input"] + row["answer_prefix"] == sample.prompt
            assert (row["index"], row["outputs"]) == (sample.index, list(sample.references))
            assert ("token_position_answer" in row) == (task == "niah_single_1")
    row = official_row(suite.samples("niah_single_1")[0])
    before = row["input"][: row["input"].index(row["outputs"][0])]
    assert row["token_position_answer"] == len(pieces.tokenize(before))


def test_cached_prompts_are_read_back_and_fewer_are_the_first_of_more(pieces, tmp_path, monkeypatch):
    made = make(pieces, tmp_path).samples("vt")
    assert make(pieces, tmp_path, seed=7).samples("vt") != made
    monkeypatch.setattr(suite_module, "make_generator", None)
    monkeypatch.setattr(planning, "make_generator", None)
    assert make(pieces, tmp_path).samples("vt") == made
    fewer = make(pieces, tmp_path, samples=2, tasks=("vt",))
    assert fewer.plan().tasks == ("vt",)
    assert fewer.samples("vt") == made[:2]


def test_damaged_cache_is_made_again(pieces, tmp_path):
    made = make(pieces, tmp_path).samples("vt")
    (file,) = tmp_path.glob("vt-*.jsonl")
    file.write_text(file.read_text()[:-40])
    assert make(pieces, tmp_path).samples("vt") == made


def test_generation_survives_a_cache_that_cannot_be_written(pieces, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert make(pieces, tmp_path / "file" / "folder").samples("vt")
    assert "not cached" in caplog.text


def test_counter_ignores_truncation_and_special_tokens(pieces):
    text = f"{BOS}Some text, 12345 words.\n\n" * 30
    expected = len(pieces.tokenize(text))
    pieces.backend_tokenizer.enable_truncation(8)
    counter = TokenCounter(pieces)
    pieces.backend_tokenizer.no_truncation()
    assert counter(text) == expected
    assert counter.many([text, "", "a b"]) == [expected, 0, 2]


@pytest.mark.parametrize("adjectives", [["b", "a", "a"], ["well", "well-off", "we", "well-o"], ["x-", "x", "x--y"]])
def test_adjective_noun_pairs_are_the_sorted_set(adjectives):
    nouns = ["off-a", "zoo", "a", "b-c", "a", "y-y", "-q"]
    pairs = AdjectiveNounPairs(adjectives, nouns)
    expected = sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    assert list(pairs) == expected
    assert pairs[-1] == expected[-1]
    assert random.Random(1).choices(pairs, k=9) == random.Random(1).choices(expected, k=9)


def words_generator(length, long_list=None):
    template = COMMON_WORDS_PROMPT.template + COMMON_WORDS_PROMPT.answer_prefix
    setting = Setting(template, length, 0, 42, lambda text: len(text) // 3)
    return CommonWordsGenerator(setting, CommonWordsTask(), long_list)


def test_common_words_beyond_the_list_need_a_longer_one():
    assert words_generator(4096).surely_fits()
    with pytest.raises(data.SourceUnavailable, match=r"english_words.json: length 200000 .* task.data_dir"):
        words_generator(200_000).surely_fits()
    draft = words_generator(200_000, [f"word{i}" for i in range(9000)]).draw(9000, 0)
    assert all(output.startswith("word") for output in draft.outputs)


def test_only_essays_in_official_order_count_as_official():
    require("ruler/essays")
    packaged = json.loads(data.resolve("ruler/essays").read_text())["text"]
    assert not starts_officially(packaged)
    assert starts_officially(official_order(packaged))
    assert Counter(official_order(packaged)) == Counter(packaged)
