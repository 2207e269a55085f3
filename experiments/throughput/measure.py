"""From cases to rows, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from experiments.errors import first_line
from experiments.throughput.bench import Bench
from experiments.throughput.cases import FAIR, Case
from experiments.throughput.engine_row import engine_row
from experiments.throughput.transformers_row import transformers_row


def measure(bench: Bench, cases: Iterable[Case]) -> Iterator[dict[str, Any]]:
    """Rows as they are measured; a case that does not fit the GPU gives a row that says so, without times."""
    for case in cases:
        problem = None
        try:
            with torch.inference_mode():
                measured = asdict((engine_row if case.protocol == FAIR else transformers_row)(bench, case))
        except torch.OutOfMemoryError as error:
            problem = first_line(error)
        if problem is not None:  # outside the handler: the error holds on to what fills the memory
            measured = {**bench.point(case), "problem": problem}
        bench.release()
        yield measured
