"""Checks that run for either executor and any device: on the CPU, under the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor

from ffd.ledger import Counts
from ffd.methods import Method, Selection
from tests.method_harness import Case, append, filled, make_case, new_layer, prefill

LENGTHS = (61, 128, 150)


def check_ledger(method: Method, executor: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """Counters of a few steps equal a recount of what the reference selects from the same storage."""
    case = make_case(batch=2).to(device)
    layer = new_layer(method, case, executor, dtype=dtype)
    prefill(layer, case, [61, 125])
    selections: list[tuple[Selection, Tensor]] = []
    for step in range(5):
        q = append(layer, case)
        layer.rows.active[1] = int(step < 3)  # row 1 finishes after three steps: the rest must not count
        chosen = deepcopy(layer.select(q, case.scale))  # it may refer to the layer's lengths, which go on counting
        selections.append((chosen, torch.tensor([1, int(step < 3)])))
        layer.decode(q, case.scale)

    def recount(per_row_head: Callable[[Selection], Tensor]) -> Tensor:
        counted = [per_row_head(s).cpu().double() * active[:, None] for s, active in selections]
        return torch.stack(counted).sum(dim=0)

    def widened(x: Tensor | None) -> Tensor:
        x = torch.zeros(2) if x is None else x
        return (x[:, None] if x.ndim == 1 else x).expand(2, 2)

    expected = Counts(
        steps=recount(lambda s: torch.ones(2, 2)),
        context=recount(lambda s: widened(s.lengths)),
        scanned=recount(lambda s: widened(s.scanned)),
        estimated=recount(lambda s: widened(s.estimated)),
        union=recount(lambda s: s.union(2).sum(dim=-1)),
        selected=recount(lambda s: s.selected.sum(dim=-1)),
    )
    counts = layer.ledger.counts()
    for field, value in vars(expected).items():
        assert torch.equal(getattr(counts, field), value), field
    moved = torch.stack(list(layer.bytes_read(counts).values())).sum(dim=0)
    doubled = layer.bytes_read(Counts(**{field: 2 * value for field, value in vars(counts).items()}))
    assert (moved > 0).all()
    torch.testing.assert_close(torch.stack(list(doubled.values())).sum(dim=0), 2 * moved)


def check_executors(
    method: Method, case: Case, tolerance: float, lengths: tuple[int, ...] = LENGTHS, **options: object
) -> None:
    """Fused output and counters equal the reference's, on ragged rows with NaN beyond them."""
    reference, q = filled(method, case, lengths, **options)
    fused, _ = filled(method, case, lengths, executor="fused", **options)
    for _ in range(2):  # scratch memory must be fit for the next step
        torch.testing.assert_close(
            fused.decode(q, case.scale), reference.decode(q, case.scale), rtol=10 * tolerance, atol=tolerance
        )
    expected, counted = reference.ledger.counts(), fused.ledger.counts()
    for field, value in vars(expected).items():
        assert torch.equal(getattr(counted, field), value), field


def check_appends(
    method: Method, device: str = "cpu", dtype: torch.dtype = torch.float32, tolerance: float = 1e-4
) -> None:
    """Fused and reference storages grown over page, block and residual boundaries decode alike."""
    case = make_case(batch=2, seed=5).to(device)
    layers = [new_layer(method, case, executor, dtype=dtype) for executor in ("reference", "fused")]
    for layer in layers:
        prefill(layer, case, [30, 126])
    for step in range(35):
        queries = [append(layer, case) for layer in layers]
        if step in (0, 1, 2, 34):
            expected, got = (layer.decode(q, case.scale) for layer, q in zip(layers, queries, strict=True))
            torch.testing.assert_close(got, expected, rtol=10 * tolerance, atol=tolerance)
