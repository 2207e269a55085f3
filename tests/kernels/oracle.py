"""Random decode steps and their comparison with the fp32 reference; used interpreted and on a GPU alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ffd import reference
from ffd.ffd_layer import FFDLayer
from ffd.kernels.ffd_decode import ffd_decode
from ffd.kernels.ffd_scratch import FFDScratch
from ffd.kernels.launch import scratch_of
from ffd.ledger import FIRST_HEAD
from ffd.methods import LayerGeometry, RowState
from ffd.methods.ffd import FFD
from ffd.scan import scanned_tokens

TIE = 2e-3
"""Natural units: a keep test closer than this to its threshold may fall either way between two summation orders."""

OUTPUT_TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """One decode step."""

    lengths: tuple[int, ...]
    group: int = 4
    num_kv_heads: int = 1
    head_dim: int = 64
    capacity: int = 0
    dtype: torch.dtype = torch.float16
    seed: int = 0
    heat: float = 2.0
    """Spread of the scores: larger keeps less."""
    knobs: dict[str, Any] = field(default_factory=lambda: {"delta": 2.0, "block_size": 64})
    shared: bool | None = None
    """Which of the two schedules; None: the layer's own choice."""

    def with_knobs(self, **knobs: Any) -> Case:
        return replace(self, knobs={**self.knobs, **knobs})


CASES = {
    "G1 d64": Case((130,), group=1),
    "G3 d80": Case((193,), group=3, head_dim=80),
    "G4 d128": Case((200,), head_dim=128, num_kv_heads=2),
    "G7 d96": Case((129,), group=7, head_dim=96),
    "G8 d64": Case((256,), group=8),
    "G9 d64": Case((150,), group=9),
    "ragged": Case((63, 192, 129), num_kv_heads=2),
    "below a block": Case((5,)),
    "one token": Case((1,)),
    "block exactly": Case((64,)),
    "block and one": Case((65,)),
    "fp32": Case((140, 70), dtype=torch.float32),
    "bf16": Case((140,), dtype=torch.bfloat16),
    "capacity": Case((100,), capacity=400),
    "sub 16": Case((200,)).with_knobs(sub_block=16),
    "sub 32": Case((150,), group=3).with_knobs(sub_block=32),
    "block 128": Case((300,)).with_knobs(block_size=128),
    "block 256": Case((520,)).with_knobs(block_size=256),
    "block 256 sub 64": Case((300,)).with_knobs(block_size=256, sub_block=64),
    "official pseudo-maximum": Case((330,), num_kv_heads=2).with_knobs(pseudo_max="scan"),
    "windows": Case((330,)).with_knobs(n_sink=10, n_local=70),
    "wide window": Case((330,)).with_knobs(n_sink=40, n_local=200, sub_block=16),
    "windows beyond the capacity": Case((200, 70)).with_knobs(n_sink=2**31 - 1, n_local=2**31 - 1),
    "no sink": Case((200,)).with_knobs(n_sink=0, n_local=1),
    "infinite": Case((200,)).with_knobs(delta=float("inf")),
    "nothing but the best": Case((260,), group=1).with_knobs(delta=0.0),
    "e4m3": Case((200,)).with_knobs(residual="e4m3"),
    "none": Case((200,)).with_knobs(residual="none"),
    "exact": Case((200,)).with_knobs(residual="exact"),
    "exact fp32": Case((200,), dtype=torch.float32).with_knobs(residual="exact"),
    "cell": Case((200,)).with_knobs(levels="cell"),
    "per head": Case((200, 77)).with_knobs(select_per="head"),
    "per head sub 16": Case((330,), group=3, num_kv_heads=2).with_knobs(select_per="head", sub_block=16, n_sink=10),
    "centre": Case((200, 90)).with_knobs(centre=True),
}


def poison(layer: FFDLayer) -> None:
    """Fill every buffer with NaN or noise, so that reading what nobody wrote is seen."""
    generator = torch.Generator(layer.codes.device).manual_seed(1)
    layer.codes.random_(0, 256, generator=generator)
    for buffer in (layer.half_step, layer.values, layer.tail):
        buffer.fill_(torch.nan)
    if layer.residual is not None:
        if layer.residual.dtype == torch.int8:
            layer.residual.random_(-128, 128, generator=generator)
        else:
            layer.residual.copy_(torch.full_like(layer.residual, torch.nan, dtype=torch.float32))


def poison_scratch(layer: FFDLayer) -> None:
    """The same for what the kernels leave between launches; only the arrival counters have a meaning."""
    from ffd.kernels.launch import _SCRATCH

    scratch: Any = _SCRATCH.get(layer.ledger)
    if scratch is not None:
        for buffer in (scratch.unit_max, scratch.near_max, scratch.zero_point, *vars(scratch.partials).values()):
            if buffer.dtype == torch.float32:
                buffer.fill_(torch.nan)
        scratch.kept_list.fill_(1 << 30)
        scratch.tiles.fill_(1 << 30)


def build(case: Case, device: torch.device | str = "cpu") -> tuple[FFDLayer, Tensor, Tensor, Tensor]:
    """Prefilled layer with poisoned stale slots, a query [B, Hq, d], and the keys and values it was given."""
    generator = torch.Generator(device).manual_seed(case.seed)
    b, hkv, d = len(case.lengths), case.num_kv_heads, case.head_dim
    longest = max(case.lengths)
    rows = RowState.allocate(b, device)
    rows.lengths.copy_(torch.tensor(case.lengths))
    if b > 1:
        rows.active[-1] = 0
    # Launches of inner layers fetch ahead, those of layer 0 do not.
    geometry = LayerGeometry(
        b, hkv * case.group, hkv, d, max(case.capacity, longest), case.dtype, torch.device(device), case.seed % 2
    )
    layer = FFD(**case.knobs).new_layer(geometry, rows, "fused")
    poison(layer)
    scratch_of(layer.ledger, lambda: FFDScratch.allocate(layer, case.shared))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q = (normal(b, hkv * case.group, d) * case.heat).to(case.dtype)
    keys = (normal(b, hkv, longest, d) + 0.3 * normal(b, hkv, 1, d)).to(case.dtype)
    values = normal(b, hkv, longest, d).to(case.dtype)
    stale = ~reference.visible(rows.lengths, longest)[:, None, :, None]
    layer.prefill(keys.masked_fill(stale, torch.nan), values.masked_fill(stale, torch.nan))
    return layer, q, keys, values


def check_appending_step(case: Case, device: torch.device | str = "cpu") -> None:
    """A step that stores its token, against the reference's storage; and one whose token fills a block."""
    block = case.knobs["block_size"]
    filling = -(-case.lengths[0] // block) * block - 1
    for first in (case.lengths[0], filling):
        grown = replace(case, lengths=(first, *case.lengths[1:]))
        grown = replace(grown, capacity=max(case.capacity, *(length + 1 for length in grown.lengths)))
        layer, q, _, _ = build(grown, device)
        twin, _, _, _ = build(grown, device)
        twin.executor = "reference"
        token = next_token(layer)
        twin.rows.lengths.add_(1)
        twin.append(*token)
        layer.rows.lengths.add_(1)
        check_step(layer, q, token)
        check_storage(layer, twin)


def next_token(layer: FFDLayer) -> tuple[Tensor, Tensor]:
    """Random keys and values [B, Hkv, 1, d]."""
    g = layer.geometry
    generator = torch.Generator(g.device).manual_seed(int(layer.lengths.sum()))
    shape = (g.batch_size, g.num_kv_heads, 1, g.head_dim)
    keys, values = (torch.randn(shape, generator=generator, device=g.device).to(g.dtype) for _ in range(2))
    return keys, values


def check_storage(layer: FFDLayer, twin: FFDLayer) -> None:
    """Compare every buffer bit for bit where it means something."""
    block = layer.method.block_size
    for row, length in enumerate(layer.lengths.tolist()):
        whole, tail = length // block * block, (length - 1) % block + 1
        for name, count in (("codes", whole), ("half_step", whole // block), ("residual", whole), ("values", length),
                            ("tail", tail)):  # fmt: skip
            ours, theirs = getattr(layer, name), getattr(twin, name)
            if ours is not None:
                ours, theirs = (x[row, :, :count].contiguous().view(torch.uint8) for x in (ours, theirs))
                assert torch.equal(ours, theirs), f"{name} of row {row} at length {length}"


def kept_units(layer: FFDLayer, q: Tensor, scale: float, near_test: bool = True) -> tuple[Tensor, Tensor]:
    """Reference keep test bool [B, Hq, units] and its distance from the threshold, natural units.

    Without ``near_test`` thumbnails alone are tested.
    """
    m, n = layer.method, int(layer.lengths.max())
    scan, refinement = layer._scores(q, scale, n)
    thumbnails = reference.visible(scanned_tokens(layer.lengths, m.block_size), n)[:, None]
    near = scan + refinement if m.pseudo_max == "refined" else scan
    floor = reference.pseudo_max(near, layer.lengths, m.n_sink, m.n_local)
    best = reference.unit_max(scan, thumbnails, m.test_size)
    if near_test and m.pseudo_max == "refined":
        window = reference.near_tokens(layer.lengths, n, m.n_sink, m.n_local)[:, None]
        best = torch.maximum(best, reference.unit_max(near, thumbnails & window, m.test_size))
    distance = best - (floor - layer.delta_nats)[..., None]
    return distance >= 0, distance


def near_only(layer: FFDLayer, q: Tensor) -> int:
    """Sub-blocks and heads whose thumbnails miss the threshold that a sink or local token's refined score reaches."""
    scale = layer.geometry.head_dim**-0.5
    by_all, by_thumbnails = (kept_units(layer, q, scale, near_test)[0] for near_test in (True, False))
    return int((by_all & ~by_thumbnails).sum())


def check_step(layer: FFDLayer, q: Tensor, token: tuple[Tensor, Tensor] | None = None) -> dict[str, float]:
    """Run the fused step, storing ``token``; compare output, kept set, logsumexp and ledger with the reference."""
    g, m = layer.geometry, layer.method
    scale = g.head_dim**-0.5
    poison_scratch(layer)
    before = layer.ledger.counters.clone()
    out, lse, kept = ffd_decode(layer, q, scale, token=token, return_logsumexp=True, return_kept=True)
    assert torch.isfinite(out).all(), "NaN or infinity in the output"

    expected, distance = kept_units(layer, q, scale)
    kept = kept.permute(0, 1, 3, 2).flatten(1, 2)
    assert not kept[..., expected.shape[-1] :].any(), "kept a sub-block beyond the length"
    kept = kept[..., : expected.shape[-1]]
    differs = kept != expected
    assert not (differs & (distance.abs() > TIE)).any(), "kept set differs beyond ties"

    # Ties apart, the output must be attention over exactly what the kernel says it kept.
    n = int(layer.lengths.max())
    selection = layer.select(q, scale)
    seen = reference.visible(layer.lengths, n)[:, None]
    complete = scanned_tokens(layer.lengths, m.block_size)
    thumbnails = reference.visible(complete, n)[:, None]
    selected = reference.expand_units(kept, m.test_size, n) & thumbnails | seen & ~thumbnails
    union = reference.union_over_group(selected, g.num_kv_heads)
    shared = reference.share_with_group(union, g.num_query_heads)
    attended = selected if m.select_per == "head" else shared
    want, want_lse = reference.masked_attention(selection.scores, attended, layer.stored_values(n))
    scale_of_output = want.abs().amax().clamp_min(1e-3)
    error = float((out.float() - want).abs().max() / scale_of_output)
    assert error < OUTPUT_TOLERANCE[g.dtype], f"output differs by {error}"
    # A row may attend to nothing: delta 0, a refined pseudo-maximum, no tail. Both sides then say -inf.
    lse_error = float((lse - want_lse).masked_fill(lse == want_lse, 0.0).abs().max())
    assert lse_error < (2e-2 if m.residual == "exact" else 2e-4), f"logsumexp differs by {lse_error}"

    step = torch.zeros_like(before)
    step[..., 0], step[..., 1], step[..., 2] = 1, layer.lengths[:, None], complete[:, None]
    step[..., 4] = union.sum(-1)
    step[..., FIRST_HEAD:] = selected.sum(-1).view(g.batch_size, g.num_kv_heads, -1)
    step *= layer.rows.active[:, None, None]
    assert torch.equal(layer.ledger.counters - before, step), "ledger differs from a recount of the kept set"
    return {"error": error, "lse_error": lse_error, "ties": int(differs.sum()), "kept": float(expected.float().mean())}
