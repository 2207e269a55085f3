"""The dense trajectory: a method runs beside dense attention, whose outputs and tokens the model goes on with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from eval.models import LoadedModel
from experiments.config import RunConfig
from experiments.engines import prefill_chunk
from experiments.refusals import refusals
from experiments.workload import Item, Workload
from ffd.cache import DecodeHandle, Probe
from ffd.continuation import Continuation, GivenTokens, GreedyTokens
from ffd.engine import Engine
from ffd.methods import Method


def make_engine(config: RunConfig, workload: Workload, loaded: LoadedModel, method: Method, **options: Any) -> Engine:
    """An engine for a workload's prompts; raises `UsageError` where the method cannot run the model."""
    with refusals():
        return Engine(
            loaded.model,
            method,
            capacity=workload.capacity,
            executor=config.executor,
            fuse=config.fuse,
            prefill_chunk=prefill_chunk(config.prefill_chunk, loaded.device),
            **options,
        )


def observer(
    config: RunConfig, workload: Workload, loaded: LoadedModel, method: Method, probe: Probe, every: int
) -> Engine:
    """An engine whose model follows dense attention while the method runs beside it and is probed."""
    engine = make_engine(config, workload, loaded, method, graph=config.graph, probe=probe, probe_every=every)
    engine.cache.follow_dense = True
    return engine


def continuation_of(item: Item, loaded: LoadedModel) -> Continuation:
    """What follows a prompt: the text's own tokens, or the answer of the dense attention that an observer follows."""
    if item.continuation is not None:
        return GivenTokens([item.continuation])
    least = 0 if item.sample is None else min(item.sample.min_new_tokens, item.max_new_tokens)
    return GreedyTokens(item.max_new_tokens, item.stop_tokens(loaded), least)


class Probes:
    """Several probes as one."""

    def __init__(self, *probes: Callable[[DecodeHandle, Tensor, float, Tensor], None]) -> None:
        self.probes = probes

    def __call__(self, handle: DecodeHandle, q: Tensor, scale: float, out: Tensor) -> None:
        """Call each; see `ffd.cache.Probe`."""
        for probe in self.probes:
            probe(handle, q, scale, out)
