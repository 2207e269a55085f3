"""The third-party scorers behind LongBench's metrics, imported on first use and pinned in behaviour.

The official numbers depend on these very packages: ``rouge`` (not ``rouge_score``), ``jieba``, and
``fuzzywuzzy`` with the standard library's matcher.
"""

from __future__ import annotations

import difflib
import importlib
import threading
import warnings
from functools import cache
from types import ModuleType
from typing import Any


def rouge_l(prediction: str, answer: str, *, nested: bool = False) -> float:
    """F-measure of rouge-l, or 0 where the package raises, as in the official scorer.

    Parameters
    ----------
    prediction, answer
        Texts; words are split at white space and sentences at full stops.
    nested
        Whether the official script calls the package one function deeper (its Chinese path).

    Notes
    -----
    The package rebuilds the common subsequence by recursion: a long text without full stops (Chinese
    summaries have none) exceeds the interpreter's recursion limit and scores 0. Which texts do would
    depend on how deep the caller sits, so each call gets a stack of its own, as deep as the official one.
    """
    call = _RougeCall(prediction, answer, nested)
    call.start()
    call.join()
    return call.f_measure


def chinese_words(text: str) -> list[str]:
    """Words of `text` by jieba's accurate mode, white space and punctuation included."""
    return list(_segmenter().cut(text, cut_all=False))


def similarity_percent(a: str, b: str) -> int:
    """Similarity of two lines as a whole percentage, 0-100."""
    return int(_fuzz().ratio(a, b))


class _RougeCall(threading.Thread):
    """One call at the official depth: a thread's three frames stand for script, scorer and metric."""

    def __init__(self, prediction: str, answer: str, nested: bool) -> None:
        super().__init__(name="longbench-rouge")
        self._hypotheses, self._references = [prediction], [answer]
        self._nested = nested
        self._package = _import("rouge").Rouge()
        self.f_measure = 0.0

    def run(self) -> None:
        try:
            if self._nested:
                scores = self._call()
            else:
                scores = self._package.get_scores(self._hypotheses, self._references, avg=True)
        except Exception:  # official rule: whatever the package raises is a score of 0
            return
        self.f_measure = float(scores["rouge-l"]["f"])

    def _call(self) -> Any:
        return self._package.get_scores(self._hypotheses, self._references, avg=True)


@cache
def _segmenter() -> Any:
    """A jieba with its own dictionary, whatever the process's shared one was taught.

    Filled by hand because jieba would trust any ``jieba.cache`` that lies in the temporary folder.
    """
    segmenter = _import("jieba").Tokenizer()
    segmenter.FREQ, segmenter.total = segmenter.gen_pfdict(segmenter.get_dict_file())
    segmenter.initialized = True
    return segmenter


@cache
def _fuzz() -> ModuleType:
    fuzz = _import("fuzzywuzzy.fuzz")
    # It prefers python-Levenshtein where that is installed, which gives other scores.
    fuzz.SequenceMatcher = difflib.SequenceMatcher  # type: ignore[attr-defined]
    return fuzz


def _import(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fuzzywuzzy recommends python-Levenshtein; jieba has old escapes
        return importlib.import_module(name)
