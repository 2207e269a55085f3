"""Question answering over documents: SQuAD (qa_1) and HotpotQA (qa_2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from eval.ruler.fitting import Draft, ImpossibleSize, Setting, SizedGenerator
from eval.ruler.tasks import QUESTION_PROMPT


@dataclass(frozen=True)
class Question:
    """A question with its documents, as positions in the list of all documents."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    """Documents that are always present."""
    related: tuple[int, ...] = ()
    """Documents taken before unrelated ones."""


@dataclass(frozen=True)
class QuestionSet:
    """Questions and the sorted documents they share."""

    questions: Sequence[Question]
    documents: Sequence[str]


def read_squad(content: Any) -> QuestionSet:
    """Answerable questions of a SQuAD v2 file; the other paragraphs of the article are related."""
    articles = [article["paragraphs"] for article in content["data"]]
    documents = sorted({paragraph["context"] for paragraphs in articles for paragraph in paragraphs})
    number = {document: i for i, document in enumerate(documents)}
    questions = []
    for paragraphs in articles:
        own = [number[paragraph["context"]] for paragraph in paragraphs]
        for gold, paragraph in zip(own, paragraphs, strict=True):
            related = tuple(i for i in own if i != gold)
            questions += [
                Question(qa["question"], tuple(answer["text"] for answer in qa["answers"]), (gold,), related)
                for qa in paragraph["qas"]
                if not qa["is_impossible"]
            ]
    return QuestionSet(questions, documents)


def read_hotpotqa(content: Any) -> QuestionSet:
    """Questions of a HotpotQA distractor file, each with all of its paragraphs."""
    paragraphs = [[f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]] for entry in content]
    documents = sorted({paragraph for own in paragraphs for paragraph in own})
    number = {document: i for i, document in enumerate(documents)}
    return QuestionSet(
        [
            Question(entry["question"], (entry["answer"],), tuple(number[paragraph] for paragraph in own))
            for entry, own in zip(content, paragraphs, strict=True)
        ],
        documents,
    )


class QuestionGenerator(SizedGenerator):
    """Draws question answering: sample i asks question i; sizes are numbers of documents."""

    def __init__(self, setting: Setting, data: QuestionSet) -> None:
        super().__init__(setting, QUESTION_PROMPT.max_new_tokens, step=10)
        self._data = data
        self._random = Random(setting.seed)

    def draw(self, size: int, index: int) -> Draft:
        """Draw the documents of question `index` and put them in the seed's fixed order."""
        question = self._data.questions[index]
        documents = self._documents(question, size)
        Random(self.setting.seed).shuffle(documents)
        context = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(documents, start=1))
        return Draft(self.setting.template.format(context=context, query=question.text), question.answers)

    def _documents(self, question: Question, size: int) -> list[str]:
        everything = self._data.documents
        if size >= len(everything):
            return [everything[i % len(everything)] for i in range(size)]
        missing = size - len(question.documents)
        if missing < 0:
            raise ImpossibleSize(f"{size} documents are fewer than the {len(question.documents)} of the question")
        if missing <= len(question.related):
            chosen = self._random.sample(question.related, missing)
        else:
            chosen = [*question.related, *self._unrelated(question, missing - len(question.related))]
        return [everything[i] for i in (*question.documents, *chosen)]

    def _unrelated(self, question: Question, count: int) -> list[int]:
        """Sample from the other documents, by rank among them: the same draw as from their list."""
        excluded = sorted({*question.documents, *question.related})
        # before[j]: how many of the other documents precede the j-th excluded one
        before = [document - j for j, document in enumerate(excluded)]
        ranks = self._random.sample(range(len(self._data.documents) - len(excluded)), count)
        return [rank + bisect_right(before, rank) for rank in ranks]
