"""Time one decode step of one layer on a GPU: FFD and dense against SDPA, by the rules of docs/kernels.md.

Needs torch and triton only. Why the numbers mean something: hot blocks are planted, so that the kept
fraction is an input; enough layers take turns in one captured graph that the L2 cache is cold; every
step is compared with the fp32 reference before it is timed; baselines run in the same process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ffd.methods.base import LayerGeometry, RowState
from ffd.methods.ffd import FFD, FFDLayer

COLD_BYTES = 4 * 60_000_000
"""What the layers of one graph must read together for each to find its data evicted: four times an H200's L2."""

HOT_NATS = 12.0
"""Score of planted tokens; others stay within about 2 nats of zero."""


@dataclass(frozen=True)
class Shape:
    """One point of the grid."""

    B: int
    T: int
    """Tokens in the cache, the current one included."""
    Hq: int = 32
    Hkv: int = 8
    d: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.d**-0.5)


@dataclass(frozen=True)
class Row:
    """One measurement; the fields of the committed record."""

    method: str
    storage: str
    B: int
    T: int
    Hq: int
    Hkv: int
    d: int
    dtype: str
    kept_target: float
    kept: float
    """Measured fraction of tokens read, union per kv head, mean over kv heads."""
    source: str
    timing: str
    l2: str
    step: list[str]
    """Stages in the timed step."""
    time_us: float
    bytes: float
    """Fixed floor: what the method's published storage must read, whatever this kernel reads."""
    floor_us: float
    efficiency: float
    sdpa_flash_us: float | None
    best_dense_us: float | None
    rel_error: float
    """Against the fp32 reference over the same kept set, ||out - ref|| / ||ref||."""


def graph_time(step: Callable[[], object], calls: int, replays: int = 30) -> float:
    """Median time in us of one of the ``calls`` that ``step`` makes, by replay of a captured graph.

    The graph repeats ``step`` until it holds at least 24 calls: starting a graph takes about 10 us.
    """
    rounds = -(-24 // calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            step()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (calls * rounds))
    return statistics.median(times)


def read_bandwidth() -> float:
    """Bytes per us that a plain reduction reads from memory."""
    data = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").view(torch.int64)
    data.random_()
    best = graph_time(lambda: data.amax(), 1)
    return float(data.numel() * 8 / best)


def plant(shape: Shape, kept: float, method: FFD, generator: torch.Generator, row: RowState) -> tuple[FFDLayer, Tensor]:
    """A layer in which about ``kept`` of the blocks score `HOT_NATS` for every head, and its query [B, Hq, d].

    The first block is always hot: it sets the pseudo-maximum. The number of hot blocks differs by at
    most one between kv heads, so that their mean meets the target.
    """
    s = shape
    device = torch.device("cuda")
    block = method.block_size
    geometry = LayerGeometry(s.B, s.Hq, s.Hkv, s.d, -(-s.T // block) * block, s.dtype, device)
    layer = method.new_layer(geometry, row, "fused")
    q = torch.randn(s.B, s.Hq, s.d, generator=generator, device=device).to(s.dtype)
    grouped = q.float().unflatten(1, (s.Hkv, -1))
    # The shortest key that every head of the group scores HOT_NATS.
    target = torch.full((*grouped.shape[:3], 1), HOT_NATS / s.scale, device=device)
    hot_key = (torch.linalg.pinv(grouped) @ target).squeeze(-1)
    keys = torch.randn(s.B, s.Hkv, s.T, s.d, generator=generator, device=device, dtype=torch.float32).mul_(0.3)
    blocks = s.T // block
    want = max(kept * s.T - (s.T - blocks * block), block) / block
    for index in range(s.B * s.Hkv):
        hot = int(want) + (torch.rand((), generator=generator, device=device) < want % 1).int().item()
        order = torch.randperm(blocks - 1, generator=generator, device=device) + 1
        chosen = torch.cat([order.new_zeros(1), order[: int(hot) - 1]])
        view = keys[index // s.Hkv, index % s.Hkv, : blocks * block].view(blocks, block, s.d)
        view[chosen] += hot_key[index // s.Hkv, index % s.Hkv]
    values = torch.randn(s.B, s.Hkv, s.T, s.d, generator=generator, device=device, dtype=s.dtype)
    layer.prefill(keys.to(s.dtype), values)
    return layer, q


def check(layer: FFDLayer, q: Tensor, scale: float) -> tuple[float, float]:
    """Relative error of the fused step against the reference, and the kept fraction; the ledgers must agree."""
    layer.ledger.reset()
    out = layer.decode(q, scale)
    fused = layer.ledger.counts()
    layer.ledger.reset()
    want, _ = layer.decode_reference(q, scale)
    expected = layer.ledger.counts()
    for name, value in vars(expected).items():
        if not torch.equal(value, getattr(fused, name)):
            raise AssertionError(f"ledger column {name}: fused {getattr(fused, name)}, reference {value}")
    error = ((out.float() - want.float()).norm() / want.float().norm()).item()
    if not error < 1e-2:
        raise AssertionError(f"output differs from the reference by {error}")
    layer.ledger.reset()
    return error, float((fused.union / fused.context).mean())


def sdpa_times(shape: Shape) -> dict[str, float]:
    """Cold-cache times in us of dense attention through PyTorch's flash and cuDNN backends."""
    s = shape
    sets = max(2, -(-COLD_BYTES // (s.B * s.T * s.Hkv * s.d * 4)))
    buffers = [
        [torch.randn(s.B, h, n, s.d, device="cuda", dtype=s.dtype) for h, n in ((s.Hq, 1), (s.Hkv, s.T), (s.Hkv, s.T))]
        for _ in range(sets)
    ]
    times = {}
    for name, backend in (("sdpa_flash", SDPBackend.FLASH_ATTENTION), ("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION)):

        def step(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                for q, k, v in buffers:
                    torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=s.scale, enable_gqa=True)

        times[name] = graph_time(step, sets)
    return times


def ffd_floor_bytes(shape: Shape, kept: float) -> float:
    """Rule 10: 2-bit codes and 16-bit scales of all tokens, 8-bit residual and 16-bit values of kept ones."""
    s = shape
    return s.B * s.T * s.Hkv * (s.d / 4 + 2 + kept * 3 * s.d)


def time_ffd(
    shape: Shape, kept: float, method: FFD, bandwidth: float, dense: dict[str, float], stages: bool = False
) -> Iterator[Row]:
    """Gate, then time the whole step (and with ``stages`` each launch alone) at one point."""
    s = shape
    generator = torch.Generator("cuda").manual_seed(s.T)
    row = RowState.allocate(s.B, "cuda")
    row.lengths.fill_(s.T)
    sets = min(160, max(2, int(-(-COLD_BYTES // ffd_floor_bytes(s, kept)))))
    layers = [plant(s, kept, method, generator, row) for _ in range(sets)]
    checked = [check(layer, q, s.scale) for layer, q in layers]
    error, measured = max(e for e, _ in checked), statistics.mean(k for _, k in checked)
    token = torch.randn(s.B, s.Hkv, 1, s.d, device="cuda", dtype=s.dtype)

    def whole() -> None:
        for layer, q in layers:
            layer.append(token, token)
            layer.decode(q, s.scale)

    from ffd.kernels.ffd_attend import ffd_attend
    from ffd.kernels.ffd_scan import ScanScratch, ffd_scan
    from ffd.kernels.launch import scratch_of
    from ffd.kernels.split_reduce import split_reduce

    def scratch(layer: FFDLayer) -> ScanScratch:
        return scratch_of(layer.ledger, lambda: ScanScratch.allocate(layer))

    steps: dict[str, Callable[[], object]] = {"append tail threshold scan attend reduce": whole}
    if stages:
        steps["append"] = lambda: [layer.append(token, token) for layer, _ in layers]
        steps["tail threshold scan"] = lambda: [ffd_scan(la, q, s.scale, scratch(la)) for la, q in layers]
        steps["attend"] = lambda: [ffd_attend(la, q, s.scale, scratch(la)) for la, q in layers]
        steps["reduce"] = lambda: [split_reduce(scratch(la).partials, torch.empty_like(q)) for la, q in layers]
    floor_bytes = ffd_floor_bytes(s, measured)
    for name, step in steps.items():
        time_us = graph_time(step, sets)
        yield Row(
            method="ffd", storage=f"{method.residual} block {method.block_size}", B=s.B, T=s.T, Hq=s.Hq, Hkv=s.Hkv,
            d=s.d, dtype=str(s.dtype).removeprefix("torch."), kept_target=kept, kept=measured, source="planted",
            timing="graph", l2="cold", step=name.split(), time_us=time_us, bytes=floor_bytes,
            floor_us=floor_bytes / bandwidth, efficiency=floor_bytes / bandwidth / time_us,
            sdpa_flash_us=dense.get("sdpa_flash"), best_dense_us=min(dense.values(), default=None), rel_error=error,
        )  # fmt: skip


def time_dense(shape: Shape, bandwidth: float) -> Iterator[Row]:
    """SDPA's two backends and our dense kernel, whole step (append and attend) for ours."""
    from ffd.methods.dense import Dense

    s = shape
    row = RowState.allocate(s.B, "cuda")
    row.lengths.fill_(s.T)
    times = sdpa_times(s)
    floor_bytes = float(s.B * s.T * s.Hkv * s.d * 4)
    sets = max(2, int(-(-COLD_BYTES // floor_bytes)))
    geometry = LayerGeometry(s.B, s.Hq, s.Hkv, s.d, s.T, s.dtype, torch.device("cuda"))
    layers = [Dense().new_layer(geometry, row, "fused") for _ in range(sets)]
    q = torch.randn(s.B, s.Hq, s.d, device="cuda", dtype=s.dtype)
    token = torch.randn(s.B, s.Hkv, 1, s.d, device="cuda", dtype=s.dtype)
    for layer in layers:
        layer.keys.normal_()
        layer.values.normal_()
    want, _ = layers[0].decode_reference(q, s.scale)
    error = float((layers[0].decode(q, s.scale).float() - want.float()).norm() / want.float().norm())
    if not error < 1e-2:
        raise AssertionError(f"dense output differs from the reference by {error}")

    def whole() -> None:
        for layer in layers:
            layer.append(token, token)
            layer.decode(q, s.scale)

    ours = graph_time(whole, sets)
    for name, time_us in (*times.items(), ("dense", ours)):
        yield Row(
            method=name, storage="16 bit", B=s.B, T=s.T, Hq=s.Hq, Hkv=s.Hkv, d=s.d,
            dtype=str(s.dtype).removeprefix("torch."), kept_target=1.0, kept=1.0, source="planted", timing="graph",
            l2="cold", step=["append", "attend", "reduce"] if name == "dense" else ["attend", "reduce"],
            time_us=time_us, bytes=floor_bytes, floor_us=floor_bytes / bandwidth,
            efficiency=floor_bytes / bandwidth / time_us, sdpa_flash_us=times["sdpa_flash"],
            best_dense_us=min(times.values()), rel_error=error if name == "dense" else 0.0,
        )  # fmt: skip


def record(row: Row) -> dict[str, Any]:
    """A row as it is committed."""
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in asdict(row).items()}
