"""LongBench v1 metrics, equal to the official scorer on every row.

Rules: THUDM/LongBench at commit 2e00731, ``LongBench/metrics.py`` and ``LongBench/eval.py``. Their
quirks are part of the published scores and are kept; each is named where it happens.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from eval.longbench import libraries
from eval.records import TaskError

Metric = Callable[[str, str, Sequence[str]], float]
"""``metric(prediction, answer, all_classes) -> score in [0, 1]``."""

_CJK_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢"
    "｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_DROP_ASCII = dict.fromkeys(map(ord, string.punctuation))
_DROP_ALL = dict.fromkeys(map(ord, string.punctuation + _CJK_PUNCTUATION))
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CODE_MARKERS = ("`", "#", "//")


def qa_f1(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """Token F1 of lower-cased English text without ASCII punctuation and articles."""
    return _token_f1(_english_tokens(prediction), _english_tokens(answer))


def qa_f1_zh(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """Token F1 over jieba's words, each stripped of punctuation and white space."""
    return _token_f1(_chinese_tokens(prediction), _chinese_tokens(answer))


def rouge(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """F-measure of the ``rouge`` package's rouge-l; 0 where the package raises (an empty text, for one)."""
    return libraries.rouge_l(prediction, answer)


def rouge_zh(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """`rouge` over jieba's words joined by spaces."""
    prediction, answer = (" ".join(libraries.chinese_words(text)) for text in (prediction, answer))
    return libraries.rouge_l(prediction, answer, nested=True)


def classification(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """One over the number of class names found in the prediction, if the right one is among them."""
    found = [name for name in all_classes if name in prediction]
    # A name inside the right name does not count against it, but the official loop removes from the
    # list that it walks and so steps over the neighbour of each removed name. Scores depend on it.
    for name in found:
        if name in answer and name != answer:
            found.remove(name)
    return 1.0 / len(found) if answer in found else 0.0


def retrieval(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """Share of the prediction's integers that equal the number in the answer ``Paragraph N``."""
    return count(prediction, _paragraph_number(r"Paragraph (\d+)", answer))


def retrieval_zh(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """Share of the prediction's integers that equal the number in the answer ``段落N``."""
    return count(prediction, _paragraph_number(r"段落(\d+)", answer))


def count(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """Share of the prediction's integers that equal the answer, compared as text."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, answer: str, all_classes: Sequence[str] = ()) -> float:
    """Edit similarity of the answer and the first predicted line without a fence or comment mark.

    A line of white space alone counts as that first line, as in the official code.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _CODE_MARKERS)), "")
    return libraries.similarity_percent(line, answer) / 100


def first_line(prediction: str) -> str:
    """First line after leading newlines; spaces stay (the rule of trec, triviaqa, samsum and lsht)."""
    return prediction.lstrip("\n").split("\n")[0]


def _english_tokens(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_DROP_ASCII)).split()


def _chinese_tokens(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_DROP_ALL).split()) for word in libraries.chinese_words(text))
    return [word for word in words if word]


def _token_f1(prediction: list[str], answer: list[str]) -> float:
    common = sum((Counter(prediction) & Counter(answer)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(prediction), common / len(answer)
    return 2 * precision * recall / (precision + recall)


def _paragraph_number(pattern: str, answer: str) -> str:
    found = re.search(pattern, answer)
    if found is None:
        raise TaskError(f"answer {answer!r} names no paragraph; accepted: text that matches {pattern!r}")
    return found.group(1)
