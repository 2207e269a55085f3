"""What each margin keeps and loses, per layer and head: curves over recorded traces, and their inversion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, cast

import torch
from torch import Tensor

from eval.fidelity.exact import ExactStep
from eval.fidelity.metrics import lse_errors
from eval.fidelity.probe import BYTES_AT_ONCE
from eval.fidelity.replay import ReplayStep, replay_steps
from eval.fidelity.stacked import selection_fields
from eval.fidelity.traces import Trace
from ffd.ledger import Ledger
from ffd.methods import LayerGeometry, Method, Selection

MARGINS = (*(x / 4 for x in range(16)), *(x / 2 for x in range(8, 16)), 8.0, 9.0, 10.0, 12.0, 16.0, 24.0, 64.0)
"""Margins tried, in nats; the last keeps everything that a float32 softmax can tell from zero."""


class MarginStorage(Protocol):
    """A layer whose rule has one margin per query head on the device."""

    delta_nats: Tensor
    """float32 [Hq], nats."""


@dataclass(frozen=True)
class Curves:
    """Means over recorded steps at each margin, all heads at the same one; ``D`` margins, ``L`` layers."""

    margins: tuple[float, ...]
    layers: tuple[int, ...]
    recall: Tensor
    """float64 [D, L, Hq]: mass recall of what the head attends to."""
    recall_own: Tensor
    """float64 [D, L, Hq]: mass recall of the head's own selection, whatever its group loads."""
    lse: Tensor
    """float64 [D, L, Hq]: logsumexp error, nats."""
    lse_own: Tensor
    """float64 [D, L, Hq]: the same over the head's own selection."""
    bytes_read: Tensor
    """float64 [D, L, Hkv]."""
    dense_bytes: Tensor
    """float64 [L, Hkv]."""

    @property
    def bytes_ratio(self) -> Tensor:
        """float64 [D, L, Hkv]."""
        return self.bytes_read / self.dense_bytes


@torch.inference_mode()
def margin_curves(
    traces: Sequence[Trace], method: Method, margins: Sequence[float] = MARGINS, executor: str = "auto"
) -> Curves:
    """Measure every margin in one pass over the traces.

    Parameters
    ----------
    traces
        Of the same layers, on the device to run on.
    method
        Its layers must have one margin per query head, ``delta_nats``.
    margins
        Ascending, nats.
    executor
        ``auto``, ``fused`` or ``reference``; decides how storages are filled.

    Raises
    ------
    ValueError
        If there are no traces, they differ in layers, or the method has no margin per head.
    """
    if not traces or any(trace.layers != traces[0].layers for trace in traces):
        raise ValueError(f"{len(traces)} traces: expected at least one, all of the same layers")
    sums: list[list[Tensor]] = [[] for _ in traces[0].layers]
    spent: list[list[Tensor]] = [[] for _ in traces[0].layers]
    steps = torch.zeros(len(sums), dtype=torch.float64)
    for trace in traces:
        by_layer = groupby(replay_steps(trace, method, executor), key=lambda step: step.layer)
        for position, (_, own) in enumerate(by_layer):
            values, read, count = _layer(own, margins, trace.scale)
            sums[position].append(values)
            spent[position].append(read)
            steps[position] += count
    total = torch.stack([torch.stack(parts).sum(dim=0) for parts in sums]) / steps[:, None, None, None]
    read = torch.stack([torch.stack(parts).sum(dim=0) for parts in spent])  # [L, D + 1, Hkv]
    recall, recall_own, lse, lse_own = total.permute(1, 2, 0, 3)
    return Curves(
        tuple(margins),
        traces[0].layers,
        recall,
        recall_own,
        lse,
        lse_own,
        bytes_read=read[:, :-1].transpose(0, 1),
        dense_bytes=read[:, -1],
    )


def _layer(steps: Iterable[ReplayStep], margins: Sequence[float], scale: float) -> tuple[Tensor, Tensor, float]:
    """Sums over a layer's steps: [4, D, Hq]; bytes read at each margin and by dense, [D + 1, Hkv]; rows counted."""
    parts: Sequence[Tensor] = ()
    ledgers: list[Ledger] = []
    values = torch.zeros(4, len(margins), 1, dtype=torch.float64)
    count = 0.0
    last: ReplayStep | None = None
    for last in steps:
        g = last.storage.geometry
        if not hasattr(last.storage, "delta_nats"):
            raise ValueError(f"method {type(last.storage).__name__}: has no margin per head (delta_nats)")
        if not ledgers:
            parts = torch.tensor(margins, dtype=torch.float32, device=g.device).split(_margins_at_once(g))
            rows = last.storage.rows.active
            ledgers = [Ledger(len(p) * len(rows), g.num_kv_heads, g.num_query_heads, g.device, rows) for p in parts]
        dense = last.dense.select(last.q, scale)
        seen = [_at_margins(last, dense, p, ledger, scale) for p, ledger in zip(parts, ledgers, strict=True)]
        values = values + torch.cat(seen, dim=1)
        count += float(last.active.sum())
    assert last is not None
    spent = []
    for part, ledger in zip(parts, ledgers, strict=True):
        read = torch.stack(list(last.storage.bytes_read(ledger.counts()).values())).sum(dim=0)
        spent.append(read.unflatten(0, (len(part), -1)).sum(dim=1))
    whole = last.storage.dense_bytes(ledgers[0].counts()).unflatten(0, (len(parts[0]), -1))[0]
    return values, torch.cat([*spent, whole.sum(dim=0, keepdim=True)]), count


def _margins_at_once(geometry: LayerGeometry) -> int:
    """Margins whose scores in float64, a dozen of them, fit into the working memory of a comparison."""
    tokens = geometry.batch_size * geometry.num_query_heads * geometry.capacity
    return max(1, BYTES_AT_ONCE // (96 * tokens))


def _at_margins(step: ReplayStep, dense: Selection, margins: Tensor, ledger: Ledger, scale: float) -> Tensor:
    """What a step keeps and loses at each margin, summed over its rows, [4, D, Hq]; what it reads goes to the ledger.

    Scores do not depend on the margin: vmap computes them once for all, and one margin's rows follow another's.
    """
    storage, heads = step.storage, step.q.shape[1]

    def at(margin: Tensor) -> dict[str, Tensor]:
        made = copy(storage)
        cast(MarginStorage, made).delta_nats = margin.expand(heads)
        return selection_fields(made, step.q, scale)

    fields = torch.func.vmap(at)(margins)
    selection = Selection(**{name: value.flatten(0, 1) for name, value in fields.items()})
    alone = replace(selection, attended=selection.selected)
    exact = ExactStep(dense.scores.repeat(len(margins), 1, 1), dense.lengths.repeat(len(margins)))
    observed = torch.stack(
        [
            (exact.probabilities * selection.attended).sum(dim=-1),
            (exact.probabilities * selection.selected).sum(dim=-1),
            lse_errors(exact, selection)["lse_error"].value,
            lse_errors(exact, alone)["lse_error"].value,
        ]
    )
    scanned = selection.scanned[:, None] if selection.scanned.ndim == 1 else selection.scanned
    ledger.active = storage.rows.active.repeat(len(margins))
    union = selection.union(storage.geometry.num_kv_heads)
    ledger.record(selection.lengths, selection.selected, union, scanned, selection.estimated)
    by_row = observed.unflatten(1, (len(margins), -1)) * step.active[:, None].double()
    return by_row.sum(dim=2).cpu()


def invert(curves: Curves, target: str, value: float, per: str) -> Tensor:
    """Margins that meet a target on the curves' own steps.

    Parameters
    ----------
    curves
        As measured.
    target
        ``mass_recall`` (at least ``value``), ``lse_error`` (at most ``value`` nats) or ``bytes_ratio`` (at most
        ``value``).
    value
        The target.
    per
        ``global``: one margin. ``layer``: one per layer. ``head``: one per query head, met by the head's own selection,
        so that it holds whatever the other heads of its group load; for ``bytes_ratio`` one per kv head.

    Returns
    -------
    Tensor
        float64 [L, Hq], nats: the smallest margin tried that meets a floor of quality, the largest that meets a ceiling
        of bytes. The largest one tried where no margin is enough, the smallest where each is too much.
    """
    shape = curves.recall.shape[1:]
    if target == "bytes_ratio":
        curve = _pooled(curves.bytes_read, per) / _pooled(curves.dense_bytes[None], per)
        meets = curve <= value
        chosen = (meets.sum(dim=0) - 1).clamp(min=0)
        chosen = chosen.repeat_interleave(shape[1] // chosen.shape[1], dim=1) if per == "head" else chosen
    else:
        own = per == "head"
        if target == "mass_recall":
            meets = _averaged(curves.recall_own if own else curves.recall, per) >= value
        else:
            meets = _averaged(curves.lse_own if own else curves.lse, per) <= value
        chosen = torch.where(meets.any(dim=0), meets.int().argmax(dim=0), len(curves.margins) - 1)
    return torch.tensor(curves.margins, dtype=torch.float64)[chosen].expand(shape).clone()


def enough_for_all(curves: Curves, target: str, value: float) -> float | None:
    """The one margin with which every head's own selection meets a target, or every kv head a ceiling of bytes.

    Returns
    -------
    float or None
        Nats: the smallest margin tried for a floor of quality, the largest for ``bytes_ratio``; None if none is enough.
    """
    meets = {
        "mass_recall": lambda: curves.recall_own >= value,
        "lse_error": lambda: curves.lse_own <= value,
        "bytes_ratio": lambda: curves.bytes_ratio <= value,
    }[target]()
    enough = [m for m, all_meet in zip(curves.margins, meets.all(dim=2).all(dim=1), strict=True) if all_meet]
    return (max if target == "bytes_ratio" else min)(enough, default=None)


def _pooled(x: Tensor, per: str) -> Tensor:
    dims = {"global": (1, 2), "layer": (2,), "head": ()}[per]
    return x.sum(dim=dims, keepdim=True) if dims else x


def _averaged(x: Tensor, per: str) -> Tensor:
    dims = {"global": (1, 2), "layer": (2,), "head": ()}[per]
    return x.mean(dim=dims, keepdim=True) if dims else x
