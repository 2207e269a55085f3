"""One layer of any method, filled with reproducible keys, values and queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ffd.methods import LayerGeometry, Method, MethodLayer, RowState, method_class

CAPACITY = 192


@dataclass
class Case:
    """Keys, values [B, Hkv, T, d] and queries [T, B, Hq, d]; token t of a row depends on nothing but the seed."""

    keys: Tensor
    values: Tensor
    queries: Tensor

    @property
    def scale(self) -> float:
        return float(self.keys.shape[-1] ** -0.5)

    def to(self, device: str) -> Case:
        return Case(self.keys.to(device), self.values.to(device), self.queries.to(device))

    def rows(self, index: int | slice) -> Case:
        one = slice(index, index + 1) if isinstance(index, int) else index
        return Case(self.keys[one], self.values[one], self.queries[:, one])


def make_case(
    batch: int = 1, kv_heads: int = 2, group: int = 2, d: int = 32, tokens: int = CAPACITY, seed: int = 0
) -> Case:
    """Random case whose scores spread over several nats, so that rules have something to choose from."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keys = normal(batch, kv_heads, tokens, d)
    keys[:, :, 0] *= 2.0
    return Case(keys, normal(batch, kv_heads, tokens, d), 1.7 * normal(tokens, batch, kv_heads * group, d))


def method_of(name: str, knobs: str | Mapping[str, Any] = "small_knobs") -> Method:
    """A method under its own ``small_knobs`` or ``keep_all_knobs``, or under given ones."""
    found = method_class(name)
    return found.from_knobs(getattr(found, knobs) if isinstance(knobs, str) else knobs)


def new_layer(
    method: Method,
    case: Case,
    executor: str = "reference",
    capacity: int = CAPACITY,
    dtype: torch.dtype = torch.float32,
) -> MethodLayer:
    """Empty storage that fits a case."""
    batch, kv_heads, _, d = case.keys.shape
    device = case.keys.device
    geometry = LayerGeometry(batch, case.queries.shape[2], kv_heads, d, capacity, dtype, device)
    return method.new_layer(geometry, RowState.allocate(batch, device), executor)  # type: ignore[arg-type]


def prefill(layer: MethodLayer, case: Case, lengths: Sequence[int]) -> None:
    """Store prompts of these lengths; slots beyond a row's length hold NaN."""
    width = max(lengths)
    layer.rows.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
    beyond = torch.arange(width, device=case.keys.device)[None] >= layer.rows.lengths[:, None]
    dtype = layer.geometry.dtype

    def poisoned(x: Tensor) -> Tensor:
        return x[:, :, :width].to(dtype).masked_fill(beyond[:, None, :, None], torch.nan)

    layer.prefill(poisoned(case.keys), poisoned(case.values))


def append(layer: MethodLayer, case: Case) -> Tensor:
    """Store each row's next token; returns its query [B, Hq, d]."""
    position = layer.rows.lengths.long().clone()
    layer.rows.lengths.add_(1)
    row = torch.arange(case.keys.shape[0], device=case.keys.device)
    dtype = layer.geometry.dtype
    layer.append(case.keys[row, :, position][:, :, None].to(dtype), case.values[row, :, position][:, :, None].to(dtype))
    return case.queries[position, row].to(dtype)


def filled(
    method: Method, case: Case, lengths: Sequence[int], executor: str = "reference", **options: Any
) -> tuple[MethodLayer, Tensor]:
    """Storage of rows with ``lengths`` tokens, the last one appended, and the query of that token."""
    layer = new_layer(method, case, executor, **options)
    prefill(layer, case, [n - 1 for n in lengths])
    return layer, append(layer, case)
