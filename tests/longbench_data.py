"""A tokenizer and rows that the LongBench tests share."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from eval.longbench import LongBenchConfig, LongBenchSuite
from eval.longbench.datasets import DATASETS

CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}"
)


def byte_tokenizer(chat_template=CHAT):
    """One token per byte of UTF-8, after one BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={"<s>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}, merges=[]))
    core.add_special_tokens(["<s>"])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = chat_template
    return tokenizer


def row(name, index=0, **changes):
    classes = ["Human", "Date"] if name in ("trec", "lsht") else None
    fields = {
        "input": f"Who {{x}} {index}?",
        "context": "Ada wrote {input} it.",
        "answers": ["Human"] if classes else ["Paragraph 1 段落1"],
        "length": 10,
        "dataset": name,
        "language": "en",
        "all_classes": classes,
        "_id": f"{name}-{index}",
    }
    return fields | changes


def write(folder, name, *rows):
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
    (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def write_all(folder):
    for name in DATASETS:
        write(folder, name, row(name), row(name, 1))
    return folder


def suite(data_dir, *, tokenizer=None, model_name="some/model", context_length=8192, **request):
    config = LongBenchConfig(data_dir=data_dir, **request)
    return LongBenchSuite(config, tokenizer or byte_tokenizer(), model_name, "llama", context_length)
