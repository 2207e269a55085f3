"""``summary.json`` of an accuracy run: the suite's scores beside what was counted, probed and timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import summary as summarise
from experiments.prepare import Prepared
from experiments.summary import Row


def build_summary(
    prepared: Prepared,
    method: Any,
    rows: Sequence[Row],
    static: Mapping[str, Any],
    fidelity: tuple[Mapping[str, Any], Mapping[str, str]],
    *,
    all_dense: bool,
) -> dict[str, Any]:
    """Every block but the run's id, status and machine, and under ``problem`` what its rows have that is invalid.

    Parameters
    ----------
    prepared
        The run.
    method
        Its method.
    rows
        Finished samples, in any order.
    static
        What the engine was: executor, graph, dense layers.
    fidelity
        Headline figures of the probed steps, and why some are null.
    all_dense
        Whether every layer is dense by configuration, so that nothing could be probed.
    """
    order = {(s.task, s.index): position for position, s in enumerate(prepared.samples)}
    ordered = sorted(rows, key=lambda row: order[row["task"], row["index"]])
    sparsity, sparsity_reasons = summarise.sparsity(ordered, *summarise.attention_heads(prepared.model.config))
    timing, timing_reasons = summarise.timing(ordered)
    validity, problem = summarise.validity(ordered, prepared.plan, static)
    values, fidelity_reasons = fidelity
    if all_dense:
        fidelity_reasons = dict.fromkeys(fidelity_reasons, "all layers are dense by configuration")
    accuracy = summarise.accuracy(prepared.suite, prepared.plan, ordered)
    return {
        "method": dict(prepared.config.method),
        "reads_everything": method.reads_everything,
        "model": {"name": prepared.model.label, "revision": prepared.model.revision},
        "task": prepared.task,
        "accuracy": accuracy,
        "average_samples": summarise.average_samples(prepared.suite, accuracy),
        "sparsity": sparsity,
        "counted": summarise.COUNTED,
        "fidelity": values,
        "validity": validity,
        "timing": timing,
        "skipped": [vars(s) for s in prepared.plan.skipped],
        "notes": list(prepared.notes),
        "null_reasons": {**sparsity_reasons, **timing_reasons, **fidelity_reasons},
        "problem": problem,
    }
