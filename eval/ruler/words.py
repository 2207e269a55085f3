"""RULER's word lists, from wonderwords."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from random import Random
from typing import overload


@cache
def word_file(name: str) -> tuple[str, ...]:
    """Words of one of wonderwords' files (``nounlist``, ``adjectivelist``, ``verblist``), in its order."""
    import wonderwords

    return tuple(wonderwords.random_word._get_words_from_text_file(f"{name}.txt"))


class AdjectiveNounPairs(Sequence[str]):
    """The sorted set of all "adjective-noun" strings, by index, without building it.

    Adjectives sorted with their hyphen give the order of their blocks of nouns, except where one
    such prefix begins another ("well-" and "well-off-"): the blocks of those interleave, and only
    those are merged.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted(set(nouns))
        # A block is a prefix whose nouns are all its words, or the merged words themselves.
        self._blocks: list[str | list[str]] = [
            group[0] if len(group) == 1 else sorted({prefix + noun for prefix in group for noun in self._nouns})
            for group in _nested_prefixes(sorted({f"{adjective}-" for adjective in adjectives}))
        ]
        sizes = (len(self._nouns) if isinstance(block, str) else len(block) for block in self._blocks)
        self._starts = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        number = bisect_right(self._starts, index) - 1
        block, offset = self._blocks[number], index - self._starts[number]
        return block + self._nouns[offset] if isinstance(block, str) else block[offset]


def _nested_prefixes(prefixes: Sequence[str]) -> Iterator[list[str]]:
    """Groups of sorted prefixes that begin with the group's first one."""
    group: list[str] = []
    for prefix in prefixes:
        if group and not prefix.startswith(group[0]):
            yield group
            group = []
        group.append(prefix)
    if group:
        yield group


@cache
def needle_words() -> AdjectiveNounPairs:
    """Words that needles use as keys (6.2 million)."""
    return AdjectiveNounPairs(word_file("adjectivelist"), word_file("nounlist"))


def common_words(seed: int) -> list[str]:
    """Word list of common words extraction, in the order that the seed gives."""
    words = sorted({*word_file("nounlist"), *word_file("adjectivelist"), *word_file("verblist")})
    Random(seed).shuffle(words)
    return words
