"""A tiny model with a tokenizer of characters, and tiny lm-eval tasks in a folder: nothing is fetched."""

from __future__ import annotations

import functools
import json
import string
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCABULARY, tiny_model

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
BOS = SPECIAL.index("<s>")
LAYERS = 2

GENERATE = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/documents.json"}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{text}}}} answer"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["q"], max_gen_toks: 12, do_sample: false}}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata: {{version: 1.0}}
"""

CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/documents.json"}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{text}}}} answer"
doc_to_choice: [" yes", " no"]
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata: {{version: 1.0}}
"""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; adds a BOS."""
    characters = [*string.ascii_lowercase, *string.digits, " ", ".", "\n"]
    vocabulary = {text: i for i, text in enumerate([*SPECIAL, *characters])}
    for i in range(len(vocabulary), VOCABULARY):
        vocabulary[chr(0x3B1 + i)] = i  # every token of the model decodes to some text
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    built.add_special_tokens(list(SPECIAL))
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}\n{% endfor %}"
    return fast


def write_model(folder: Path) -> Path:
    """Save the model and its tokenizer as a Hugging Face folder."""
    tiny_model("llama", layers=LAYERS, bos_token_id=BOS, eos_token_id=2).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_tasks(folder: Path, documents: int = 4) -> Path:
    """Write both tasks with their documents, long enough that small blocks are dropped."""
    rows: list[dict[str, Any]] = [
        {"text": " ".join(f"{word}{i * 7 % 10}" for word in ("alpha", "beta", "gamma") * (16 + 2 * i)),
         "answer": "yes", "label": i % 2}
        for i in range(documents)
    ]  # fmt: skip
    (folder / "documents.json").write_text("\n".join(map(json.dumps, rows)))
    (folder / "tiny_generate.yaml").write_text(GENERATE.format(folder=folder))
    (folder / "tiny_choice.yaml").write_text(CHOICE.format(folder=folder))
    return folder


def leave_out_builtin_tasks(monkeypatch: Any) -> None:
    """Spare each command the seconds that reading lm-eval's thousands of task files takes."""
    from lm_eval.tasks import TaskManager

    original = TaskManager.__init__
    monkeypatch.setattr(TaskManager, "__init__", functools.partialmethod(original, include_defaults=False))
