"""Traces of prompts along the dense trajectory, for calibration and matched comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from eval.fidelity.traces import TraceRecorder
from eval.models import LoadedModel
from experiments.config import RunConfig
from experiments.trajectory import continuation_of, observer
from experiments.workload import Item, Workload
from ffd.methods.dense import Dense
from ffd.teacher import forced_logits


def record_traces(
    config: RunConfig, workload: Workload, loaded: LoadedModel, items: Sequence[Item], folder: Path
) -> Iterator[tuple[Item, Path, int]]:
    """Follow each prompt by dense attention and keep queries, keys and values of all layers.

    Yields
    ------
    tuple
        The prompt, its trace, and the steps recorded: 0, without a file, where the answer was a single token.
    """
    recorder = TraceRecorder()
    beside = observer(config, workload, loaded, Dense(), recorder, max(1, config.fidelity.every))
    for item in items:
        continuation = continuation_of(item, loaded)
        recorder.start()
        for _ in forced_logits(beside, [item.prompt], continuation):
            pass
        path = folder / f"{item.task}-{item.index}.safetensors"
        decode_steps = len(continuation.tokens[0]) - 1
        steps = -(-decode_steps // max(1, config.fidelity.every))
        if steps:
            recorder.take(f"{workload.model.name}, {item.task} {item.index}", decode_steps).save(path)
        yield item, path, steps
