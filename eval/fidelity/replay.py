"""Replay of methods over recorded traces: what they would have kept and lost, without the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from eval.fidelity.accumulate import FidelityState
from eval.fidelity.layer_step import LayerStep, compare
from eval.fidelity.traces import Trace
from ffd.methods import LayerGeometry, Method, MethodLayer, RowState
from ffd.methods.dense import Dense
from ffd.report import LayerReport, layer_report


@dataclass(frozen=True, eq=False)
class ReplayStep:
    """A recorded decode step of one layer, the storages filled as they were in the model."""

    layer: int
    """The model's layer."""
    index: int
    """Position of the step in the trace."""
    storage: MethodLayer
    dense: MethodLayer
    """Exact keys and values of the same tokens."""
    q: Tensor
    """[B, Hq, d]."""
    active: Tensor
    """bool [B]."""


@torch.inference_mode()
def replay_steps(trace: Trace, method: Method, executor: str = "auto") -> Iterator[ReplayStep]:
    """Every recorded step, layer by layer; one layer is in memory at a time.

    Prompts are prefilled and the other tokens appended one by one, so the storage is what it was, or
    would have been, in the model.

    Parameters
    ----------
    trace
        On the device to run on.
    method
        Any method; its ``skip_layers`` is ignored, every recorded layer decodes by it.
    executor
        ``auto``, ``fused`` or ``reference``.
    """
    from ffd.executor import resolve_executor

    any_queries = trace.queries[trace.layers[0]]
    device = any_queries.device
    resolved = resolve_executor(executor, device)
    width = int(trace.prompt_lengths.max())
    steps = {tuple(row): s for s, row in enumerate(trace.lengths.tolist())}
    for layer in trace.layers:
        keys, queries = trace.keys[layer], trace.queries[layer]
        values = trace.values.get(layer, keys)
        b, hkv, capacity, d = keys.shape
        rows = RowState.allocate(b, device)
        geometry = LayerGeometry(b, queries.shape[2], hkv, d, capacity, keys.dtype, keys.device, layer)
        storage, dense = (m.new_layer(geometry, rows, resolved) for m in (method, Dense()))
        rows.lengths.copy_(trace.prompt_lengths)
        for store in (storage, dense):
            store.prefill(keys[:, :, :width], values[:, :, :width])
        for _ in range(int((trace.lengths.amax(dim=0) - trace.prompt_lengths).max())):
            rows.lengths.add_(1)
            token = (rows.lengths.long() - 1).view(b, 1, 1, 1).expand(b, hkv, 1, d)
            for store in (storage, dense):
                store.append(keys.gather(2, token), values.gather(2, token))
            step = steps.get(tuple(rows.lengths.tolist()))
            if step is None:
                continue
            rows.active.copy_(trace.active[step])
            yield ReplayStep(layer, step, storage, dense, queries[step], trace.active[step])


@torch.inference_mode()
def replay_with_ledger(
    trace: Trace, method: Method, unit: int = 16, executor: str = "auto"
) -> tuple[FidelityState, tuple[LayerReport, ...]]:
    """Decode the recorded steps by a method: its fidelity, and what it read in each recorded layer.

    Parameters
    ----------
    trace, method, executor
        As for `replay_steps`.
    unit
        Tokens per page of the page-level Spearman correlation.
    """
    any_queries = trace.queries[trace.layers[0]]
    state = FidelityState(unit, trace.layers, any_queries.shape[2], device=any_queries.device)
    reports = []
    by_layer = groupby(replay_steps(trace, method, executor), key=lambda step: step.layer)
    for position, (layer, steps) in enumerate(by_layer):
        for step in steps:
            out = step.storage.decode(step.q, trace.scale)
            known = out if trace.values else None
            seen = LayerStep(step.storage, step.dense, step.q, trace.scale, known)
            state.add(position, [compare([seen], unit)], step.active)
        reports.append(layer_report(layer, True, step.storage))
    return state.to("cpu"), tuple(reports)


def replay(trace: Trace, method: Method, unit: int = 16, executor: str = "auto") -> FidelityState:
    """Fidelity alone; see `replay_with_ledger`."""
    return replay_with_ledger(trace, method, unit, executor)[0]
