"""``python -m eval.ruler.score FOLDER``: score official-format prediction files.

Reads ``<task>.jsonl`` for any of the 13 tasks, one object with ``pred`` and ``outputs`` per line,
and writes ``FOLDER/result.json``, ``{task: score}``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.ruler.scoring import score_prediction
from eval.ruler.tasks import TASKS
from eval.statistics import task_score


class PredictionError(ValueError):
    """A folder or file that cannot be scored; the message is one line."""


def score_folder(folder: Path) -> dict[str, float]:
    """Scores in percent of the prediction files of a folder, in the official order of the tasks.

    Raises
    ------
    PredictionError
        No folder, no prediction file, or a file with no, unreadable or incomplete lines.
    """
    if not folder.is_dir():
        raise PredictionError(f"{folder}: no such folder")
    scores = {}
    for task in TASKS:
        file = folder / f"{task}.jsonl"
        if file.exists():
            score = task_score([_score_line(task, *line) for line in _lines(file)]).score
            if score is None:
                raise PredictionError(f"{file}: holds no predictions")
            scores[task] = score
    if not scores:
        raise PredictionError(
            f"{folder}: holds no prediction file; expected <task>.jsonl with task one of {', '.join(TASKS)}"
        )
    return scores


def _lines(file: Path) -> list[tuple[str, str]]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PredictionError(f"{file}: cannot be read ({' '.join(str(error).split())})") from None
    return [(f"{file}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]


def _score_line(task: str, where: str, line: str) -> float:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PredictionError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise PredictionError(f"{where}: not a JSON object")
    if not isinstance(row.get("pred"), str):
        raise PredictionError(f"{where}: 'pred' must be a string")
    references = row.get("outputs")
    if not isinstance(references, list) or not references or not all(isinstance(item, str) for item in references):
        raise PredictionError(f"{where}: 'outputs' must be a list of at least one string")
    return score_prediction(TASKS[task].metric, row["pred"], references)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.ruler.score", description="Score RULER prediction files.")
    parser.add_argument("folder", type=Path, help="folder with <task>.jsonl files (pred, outputs per line)")
    folder: Path = parser.parse_args(arguments).folder
    try:
        scores = score_folder(folder)
        partial = folder / ".result.json.partial"
        partial.write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / "result.json")
    except PredictionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {folder / 'result.json'}: cannot be written ({error.strerror or error})", file=sys.stderr)
        return 1
    for task, score in scores.items():
        print(f"{task:16} {score:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
