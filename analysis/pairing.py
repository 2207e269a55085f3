"""Pair two runs sample by sample: equal prompts only, grouped by the document that the prompt is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from analysis.load import Run
from analysis.shapes import is_number


class PairingError(ValueError):
    """Two runs cannot be compared; the message names the runs and the first difference."""


@dataclass(frozen=True)
class Pairs:
    """Scores of the samples that both runs finished, in [0, 1], sample by sample."""

    task: str
    first: tuple[float, ...]
    second: tuple[float, ...]
    documents: tuple[str, ...]
    """Which document each prompt is about; samples of one document are not independent."""

    @property
    def differences(self) -> list[float]:
        """Second minus first."""
        return [b - a for a, b in zip(self.first, self.second, strict=True)]


def pair(first: Run, second: Run) -> tuple[list[Pairs], list[str]]:
    """Pair the samples of two runs by task and index.

    Returns
    -------
    pairs : list of Pairs
        One per task, in the order of the first run.
    notes : list of str
        Samples that only one of the two runs has.

    Raises
    ------
    PairingError
        If a sample's prompts differ, one has no score, or no sample is in both runs.
    """
    common = [key for key in first.samples if key in second.samples]
    if not common:
        raise PairingError(f"{first.run_id} and {second.run_id} have no sample in common")
    for run in (first, second):
        for key in common:
            _require_scored(run, key)
    for key in common:
        if first.samples[key]["prompt_fingerprint"] != second.samples[key]["prompt_fingerprint"]:
            raise PairingError(
                f"{first.run_id} and {second.run_id} ran different prompts (first: {key[0]} {key[1]}); "
                "a comparison needs the same task, length, template, seed and tokenizer"
            )
    notes = []
    for run in (first, second):
        alone = len(run.samples) - len(common)
        if alone:
            notes.append(f"{alone} samples of {run.run_id} have no counterpart and are left out")
    pairs = []
    for task in dict.fromkeys(task for task, _ in common):
        keys = [key for key in common if key[0] == task]
        pairs.append(
            Pairs(
                task,
                tuple(float(first.samples[key]["score"]) for key in keys),
                tuple(float(second.samples[key]["score"]) for key in keys),
                tuple(document(first.samples[key]) for key in keys),
            )
        )
    return pairs, notes


def _require_scored(run: Run, key: tuple[str, int]) -> None:
    row = run.samples[key]
    score = row.get("score")
    if not is_number(score):
        raise PairingError(f"{run.run_id}: sample {key[0]} {key[1]} has score={score}, expected a number")
    if not isinstance(row.get("prompt_fingerprint"), str):
        raise PairingError(f"{run.run_id}: sample {key[0]} {key[1]} has no prompt_fingerprint")


def document(row: dict[str, Any]) -> str:
    """Name of the document a sample's prompt is about; without one, every prompt is a document of its own."""
    extra = row.get("extra")
    return str((isinstance(extra, dict) and extra.get("document")) or row["prompt_fingerprint"])
