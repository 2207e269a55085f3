"""Cutting the middle out of a raw prompt, before any chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def truncate_middle(tokenizer: PreTrainedTokenizerBase, prompt: str, max_input: int) -> tuple[str, bool]:
    """Keep the first and the last half of a prompt's token budget, as text.

    Parameters
    ----------
    tokenizer
        Tokenizer of the evaluated model.
    prompt
        Whole prompt, instruction and question included.
    max_input
        Budget in tokens, counted with the tokenizer's own special tokens; an odd one loses a token.

    Returns
    -------
    tuple of str and bool
        The prompt, and whether it was cut. The halves are decoded without special tokens and joined,
        so that tokenizing the result again may give a few tokens more or less than the budget.

    Notes
    -----
    Rule of THUDM/LongBench ``pred.py`` at commit 2e00731.
    """
    tokens = tokenizer(prompt, truncation=False, verbose=False).input_ids
    if len(tokens) <= max_input:
        return prompt, False
    half = max_input // 2
    head, tail = (tokenizer.decode(part, skip_special_tokens=True) for part in (tokens[:half], tokens[-half:]))
    return f"{head}{tail}", True
