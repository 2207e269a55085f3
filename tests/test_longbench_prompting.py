"""LongBench prompts: the middle cut, budgets, chat templates, limits."""

import pytest

from eval.longbench import LongBenchConfig
from eval.longbench.datasets import DATASETS
from eval.longbench.models import OFFICIAL_MODELS, derived_max_input
from eval.longbench.truncation import truncate_middle
from eval.records import TaskError
from tests.longbench_data import byte_tokenizer, row, suite, write, write_all


@pytest.fixture
def data(tmp_path):
    return write_all(tmp_path)


# --- the middle cut -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_input", [2, 3, 10, 31, 32, 64, 65, 66])
@pytest.mark.parametrize("text", ["abcdefghij" * 6 + "wxyz", "研究ab究研" * 7])
def test_truncation_equals_cutting_bytes(text, max_input):
    """One token per byte: the first half holds BOS and is a byte shorter; broken characters decode to U+FFFD."""
    content = text.encode()
    half = max_input // 2
    if len(content) + 1 <= max_input:
        expected = text, False
    else:
        head, tail = content[: half - 1], content[len(content) - half :]
        expected = head.decode(errors="replace") + tail.decode(errors="replace"), True
    assert truncate_middle(byte_tokenizer(), text, max_input) == expected


def test_raw_prompt_is_cut_before_the_template(data):
    write(data, "qasper", row("qasper", context="x" * 9000))
    (sample,) = suite(data, tasks=["qasper"], max_input=400).samples("qasper")
    raw = DATASETS["qasper"].template.format(context="x" * 9000, input="Who {x} 0?")
    assert sample.truncated
    assert sample.prompt == f"<s><user>{raw[:199]}{raw[-200:]}<assistant><no thoughts>"


# --- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DATASETS)
def test_samples_carry_the_official_prompt_and_limits(data, name):
    made = suite(data, tasks=[name], template="none").samples(name)
    assert [s.index for s in made] == [0, 1]
    sample = made[1]
    template = DATASETS[name].template
    assert sample.prompt == template.replace("{context}", "Ada wrote \0 it.").replace("{input}", "Who {x} 1?").replace(
        "\0", "{input}"
    )
    assert sample.max_new_tokens == DATASETS[name].max_new_tokens
    assert sample.references == tuple(row(name)["answers"])
    assert sample.extra["_id"] == f"{name}-1"
    assert (sample.stop_strings, sample.min_new_tokens) == ((("\n",), 1) if name == "samsum" else ((), 0))


@pytest.mark.parametrize("template", ["auto", "chat"])
def test_chat_template_wraps_all_but_the_six_raw_sets(data, template):
    made = suite(data, template=template)
    for name in DATASETS:
        sample = made.samples(name)[0]
        wrapped = sample.prompt.startswith("<s><user>") and sample.prompt.endswith("<assistant><no thoughts>")
        assert wrapped == (name not in {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
        # Exactly one BOS either way: in the text, or from the tokenizer.
        assert made.encode(sample).count(0) == 1
        assert made.encode(sample)[0] == 0
    plan = made.plan()
    assert not plan.official
    assert any("tokenizer's own, an extension" in note for note in plan.notes)


def test_without_a_chat_template(data):
    plain = byte_tokenizer(chat_template=None)
    assert suite(data, tokenizer=plain, tasks=["qasper"]).samples("qasper")[0].prompt.startswith("You are given")
    with pytest.raises(TaskError, match=r"task\.template=chat: .* no chat template; accepted: auto, none"):
        suite(data, tokenizer=plain, template="chat")


@pytest.mark.parametrize(
    ("name", "context", "budget", "start", "end"),
    [
        ("meta-llama/Llama-2-7b-chat-hf", 4096, 3500, "[INST]You", "Answer:[/INST]"),
        ("vicuna-7b-v1.5-16k", 16384, 15500, "A chat between a curious user", "Answer: ASSISTANT:"),
        ("longchat-v1.5-7b-32k", 32768, 31500, "A chat between a curious user", "Answer: ASSISTANT:"),
        ("xgen-7b-8k", 8192, 7500, "A chat between a curious human", "Answer:\n###"),
        ("internlm-7b-8k", 8192, 7500, "<|User|>:You", "Answer:<eoh>\n<|Bot|>:"),
    ],
)
def test_listed_models_get_their_official_template_and_budget(data, name, context, budget, start, end):
    made = suite(data, tasks=["qasper"], model_name=name, context_length=context)
    sample = made.samples("qasper")[0]
    assert sample.prompt.startswith(start)
    assert sample.prompt.endswith(end)
    assert sample.add_special_tokens
    assert f"input budget {budget} tokens (official table" in made.plan().notes[0]


def test_predictions_of_listed_models_are_cleaned(data):
    made = suite(data, tasks=["passage_count"], model_name="internlm-7b-8k")
    write(data, "passage_count", row("passage_count", answers=["7"]))
    sample = made.samples("passage_count")[0]
    assert made.score(sample, "7<eoa> 8") == 1.0
    assert made.prediction_row(sample, "7<eoa> 8") == {
        "pred": "7",
        "answers": ["7"],
        "all_classes": None,
        "length": 10,
    }


def test_models_whose_template_is_not_text_say_so(data):
    for name in ("chatglm3-6b-32k", "chatglm2-6b"):
        with pytest.raises(TaskError, match="accepted: none, chat"):
            suite(data, model_name=name, context_length=32768)


# --- budgets --------------------------------------------------------------------------------------


def test_derived_budget_continues_the_official_table():
    contexts = {"4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768}
    for model in OFFICIAL_MODELS:
        if (context := model.name.rsplit("-", 1)[-1]) in contexts:
            assert derived_max_input(contexts[context]) == model.max_input
    assert derived_max_input(131072) == 127500
    with pytest.raises(TaskError, match="context_length=512 is too short"):
        derived_max_input(512)


def test_budget_without_room_is_refused(data):
    with pytest.raises(
        TaskError, match=r"input budget 8000 \(task.max_input\) .* accepted: task.max_input up to 76\d\d"
    ):
        suite(data, max_input=8000)
    with pytest.raises(TaskError, match=r"input budget 31500 \(task.profile=ffd_paper\) .* exceed the context of 8192"):
        suite(data, profile="ffd_paper")
    assert suite(data, max_input=8000, tasks=["trec"]).plan().tasks == ("trec",)


def test_paper_profile(data):
    made = suite(data, profile="ffd_paper", context_length=131072)
    for name in DATASETS:
        sample = made.samples(name)[0]
        assert sample.max_new_tokens == 64
        assert "<user>" not in sample.prompt
    plan = made.plan()
    assert not plan.official
    assert any(note.startswith("profile ffd_paper: 31,500 input tokens") for note in plan.notes)
    notes = suite(data, profile="ffd_paper", max_input=3000).plan().notes
    assert any(note.startswith("profile ffd_paper: task.max_input=3000, 64 new tokens") for note in notes)
    with pytest.raises(TaskError, match="contradicts"):
        LongBenchConfig(profile="ffd_paper", template="chat")
