"""The 21 LongBench v1 datasets: category, prompt, limits and metric of each.

Facts from THUDM/LongBench at commit 2e00731: ``config/dataset2prompt.json``,
``config/dataset2maxlen.json``, ``pred.py``, ``eval.py`` and ``task.md`` of its ``LongBench`` folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from eval.longbench import metrics
from eval.longbench.metrics import Metric


@dataclass(frozen=True)
class Dataset:
    """One LongBench dataset."""

    name: str
    category: str
    """One of `CATEGORIES`."""
    language: str
    """``en``, ``zh`` or ``code``."""
    metric: Metric
    max_new_tokens: int
    rows: int = 200
    """Rows of the official set."""
    extended_rows: int = 0
    """Rows of the official LongBench-E set; 0 where there is none."""
    chat: bool = True
    """Whether a chat template may be applied: few-shot and code prompts are continued as raw text."""
    first_line: bool = False
    """Whether only the first line of a prediction counts."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end generation beside the model's own end tokens."""
    min_new_tokens: int = 0

    @property
    def template(self) -> str:
        """Official prompt text with the fields ``{context}`` and ``{input}``."""
        return _prompts()[self.name]

    def score(self, prediction: str, answers: Sequence[str], all_classes: Sequence[str] | None) -> float:
        """Best score of one prediction over its accepted answers, in [0, 1]; 0 without answers."""
        if self.first_line:
            prediction = metrics.first_line(prediction)
        return max((self.metric(prediction, answer, all_classes or ()) for answer in answers), default=0.0)


SINGLE, MULTI, SUMMARY, FEW_SHOT, SYNTHETIC, CODE = CATEGORIES = (
    "single_doc_qa",
    "multi_doc_qa",
    "summarization",
    "few_shot",
    "synthetic",
    "code",
)

_TABLE = (
    Dataset("narrativeqa", SINGLE, "en", metrics.qa_f1, 128),
    Dataset("qasper", SINGLE, "en", metrics.qa_f1, 128, extended_rows=224),
    Dataset("multifieldqa_en", SINGLE, "en", metrics.qa_f1, 64, rows=150, extended_rows=150),
    Dataset("multifieldqa_zh", SINGLE, "zh", metrics.qa_f1_zh, 64),
    Dataset("hotpotqa", MULTI, "en", metrics.qa_f1, 32, extended_rows=300),
    Dataset("2wikimqa", MULTI, "en", metrics.qa_f1, 32, extended_rows=300),
    Dataset("musique", MULTI, "en", metrics.qa_f1, 32),
    Dataset("dureader", MULTI, "zh", metrics.rouge_zh, 128),
    Dataset("gov_report", SUMMARY, "en", metrics.rouge, 512, extended_rows=300),
    Dataset("qmsum", SUMMARY, "en", metrics.rouge, 512),
    Dataset("multi_news", SUMMARY, "en", metrics.rouge, 512, extended_rows=294),
    Dataset("vcsum", SUMMARY, "zh", metrics.rouge_zh, 512),
    Dataset("trec", FEW_SHOT, "en", metrics.classification, 64, extended_rows=300, chat=False, first_line=True),
    Dataset("triviaqa", FEW_SHOT, "en", metrics.qa_f1, 32, extended_rows=300, chat=False, first_line=True),
    Dataset(
        "samsum",
        FEW_SHOT,
        "en",
        metrics.rouge,
        128,
        extended_rows=300,
        chat=False,
        first_line=True,
        stop_strings=("\n",),  # models go on with another dialogue
        min_new_tokens=1,
    ),
    Dataset("lsht", FEW_SHOT, "zh", metrics.classification, 64, chat=False, first_line=True),
    Dataset("passage_count", SYNTHETIC, "en", metrics.count, 32, extended_rows=300),
    Dataset("passage_retrieval_en", SYNTHETIC, "en", metrics.retrieval, 32, extended_rows=300),
    Dataset("passage_retrieval_zh", SYNTHETIC, "zh", metrics.retrieval_zh, 32),
    Dataset("lcc", CODE, "code", metrics.code_similarity, 64, rows=500, extended_rows=300, chat=False),
    Dataset("repobench-p", CODE, "code", metrics.code_similarity, 64, rows=500, extended_rows=300, chat=False),
)

DATASETS: Mapping[str, Dataset] = MappingProxyType({dataset.name: dataset for dataset in _TABLE})
"""Every dataset by name, in the official order."""

EXTENDED: tuple[str, ...] = tuple(name for name, dataset in DATASETS.items() if dataset.extended_rows)
"""The 13 datasets of LongBench-E."""

BUCKETS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"0-4k": (float("-inf"), 4000), "4-8k": (4000, 8000), "8k+": (8000, float("inf"))}
)
"""LongBench-E's length buckets: from the first bound to below the second, in the rows' ``length`` unit."""


def bucket_of(length: int) -> str:
    """Name of the LongBench-E bucket of a row's ``length``."""
    return next(name for name, (low, high) in BUCKETS.items() if low <= length < high)


@cache
def _prompts() -> Mapping[str, str]:
    # JSON escapes keep the trailing spaces and newlines that editors and formatters strip.
    text = (Path(__file__).parent / "prompts.json").read_text(encoding="utf-8")
    prompts: dict[str, str] = json.loads(text)
    return MappingProxyType(prompts)
