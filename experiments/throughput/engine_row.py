"""Any method under the engine, dense included: the rows that say what sparsity is worth."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from experiments.throughput.bench import Bench
from experiments.throughput.cases import Case
from experiments.throughput.margins import set_kept
from experiments.throughput.row import Row, kv_bytes
from experiments.throughput.steps import WINDOW, Steps, stored_bytes
from ffd.cache import UnsupportedModelError
from ffd.engine import Engine

_WINDOWS = {"cuda": 6, "cpu": 2}
_EAGER_WINDOWS = 2
_CAPTURES = 3
_WARM_UP_PROMPT = 8192


def engine_row(bench: Bench, case: Case) -> Row:
    """Measure one case; prefill first, since it begins the cache anew."""
    engine = make_engine(bench, case)
    prefill = _prefill(bench, engine, case.T) if case.prefill else {}
    steps = Steps(engine, case.T)
    store_ms = steps.fill()
    if case.kept is not None and case.method.margins_per_head:
        set_kept(steps, case.kept)
    resident = bench.begin_memory()
    milliseconds = steps.time(_WINDOWS[engine.device.type])
    kept, peak = steps.kept(), bench.peak_memory()
    storage = sum(stored_bytes(handle.storage) for handle in engine.cache.handles)
    return Row(
        **bench.point(case),
        **bench.speed(case, milliseconds, steps.bytes_per_step()),
        kept=kept,
        timing="graph" if steps.captured else "eager",
        fused=list(engine.fused),
        kv_bytes_per_token=storage / (case.B * engine.cache.capacity),
        dense_kv_bytes_per_token=kv_bytes(engine.model),
        resident_bytes=resident,
        peak_bytes=peak,
        store_ms=store_ms,
        **prefill,
        graph_ablation=_ablation(steps, milliseconds, case) if case.ablation else None,
    )


def make_engine(bench: Bench, case: Case) -> Engine:
    """The engine of a case, with room for a window of steps after its tokens.

    Raises
    ------
    UnsupportedModelError
        For a model with sliding-window layers, whose stock caches are not filled here.
    """
    engine = Engine(
        bench.model,
        case.method,
        capacity=case.T + WINDOW,
        batch_size=case.B,
        executor=bench.executor,
        graph=bench.graph,
        fuse=case.fuse if case.fuse == "auto" else case.fuse == "true",
        prefill_chunk=bench.prefill_chunk,
    )
    if engine.cache.sliding_layers:
        raise UnsupportedModelError(
            f"{engine.cache.sliding_layers} sliding-window layers: runner=throughput times full attention only"
        )
    return engine


def _prefill(bench: Bench, engine: Engine, tokens: int) -> dict[str, Any]:
    """Prefill and first token of one prompt of random ids, after a shorter one that compiles and allocates."""
    vocabulary = engine.model.config.get_text_config(decoder=True).vocab_size
    prompt = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    engine.generate([prompt[:_WARM_UP_PROMPT]], 1)
    bench.begin_memory()
    done = engine.generate([prompt], 1)
    return {
        "prefill_ms": 1e3 * done.prefill_seconds,
        "ttft_ms": 1e3 * done.ttft_seconds,
        "prefill_peak_bytes": bench.peak_memory(),
    }


def _ablation(steps: Steps, graph_ms: float, case: Case) -> dict[str, float] | None:
    """The step eagerly, and by the paper's scheme, in which a graph holds for one number of complete blocks.

    The scheme's captures are spread over the steps of a block. None where nothing is captured, or the method has no
    blocks. Capturing alone is counted: kernels are compiled and library workspaces allocated already.
    """
    block = getattr(case.method, "block_size", None)
    if not steps.captured or block is None:
        return None
    eager = steps.time(_EAGER_WINDOWS, eager=True)
    capture = statistics.median(steps.capture_anew() - graph_ms for _ in range(_CAPTURES))
    return {
        "eager": eager,
        "one_graph": graph_ms,
        "recaptured": graph_ms + capture / block,
        "capture": capture,
        "steps_per_capture": block,
    }
