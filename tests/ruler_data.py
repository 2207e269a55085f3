"""Small stand-ins for RULER's data, and the check that the real ones are at hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eval import data
from eval.data import store


def require(*names: str) -> None:
    """Skip the test unless the sources are cached or named by their environment variables."""
    for name in names:
        source = data.SOURCES[name]
        if not (store.is_cached(source) or os.environ.get(source.variable)):
            pytest.skip(f"data source {name} is absent; `python -m eval.data fetch --for tests` gets it")


def write_squad(folder: Path, words_per_document: int = 20, documents: int = 40) -> None:
    """A SQuAD file of one article with a question per paragraph."""
    paragraphs = [
        {
            "context": f"Paragraph {i} " + "word " * words_per_document,
            "qas": [{"question": f"Which is {i}?", "answers": [{"text": str(i)}], "is_impossible": False}],
        }
        for i in range(documents)
    ]
    _write(folder / "squad.json", {"data": [{"paragraphs": paragraphs}]})


def write_hotpotqa(folder: Path, paragraphs: int = 10, questions: int = 8) -> None:
    """A HotpotQA file whose questions have a given number of paragraphs."""
    content = [
        {
            "question": f"Who is {i}?",
            "answer": f"Person {i}",
            "context": [[f"Title {i} {j}", [f"Sentence {i} {j}. ", "Another one."]] for j in range(paragraphs)],
        }
        for i in range(questions)
    ]
    _write(folder / "hotpotqa.json", content)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))
