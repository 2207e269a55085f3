"""Storages of several layers of one cache read as one: a selection in all of them costs one layer's launches.

On a GPU a reference selection is a hundred small launches, and a probed step would pay them for every layer.
``torch.func.vmap`` runs a storage's own code with every tensor of it stacked over the layers, so that no method
has to know.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ffd.ledger import Ledger
from ffd.methods import LayerGeometry, Method, MethodLayer, RowState, Selection

_PLAIN = (Method, str, int, float, type(None))  # compared by value
_OWN = (LayerGeometry, Ledger)  # a layer's own, but nothing that a selection depends on
_OPTIONAL_ROWS = ("pseudo_max", "margin", "score_shift")  # broadcastable to [B, Hq]


class StackedLayers:
    """Layers of one cache, whose results come row by row: [B, ...] of each layer becomes [layers * B, ...].

    Parameters
    ----------
    storages
        Layers of one cache that differ in nothing but tensors, see `signature`.
    """

    def __init__(self, storages: Sequence[MethodLayer]) -> None:
        self._first = storages[0]
        parts = [_tensors(storage) for storage in storages] if len(storages) > 1 else []
        self._stacked = [torch.stack(same) for same in zip(*parts, strict=True)]

    def select(self, q: Tensor, scale: float) -> Selection:
        """`MethodLayer.select` of every layer.

        Parameters
        ----------
        q
            [layers, B, Hq, d].
        scale
            Softmax scale.

        Raises
        ------
        RuntimeError
            From vmap, if the method looks at its layers' numbers on the host.
        """
        return Selection(**self._rows_of(lambda storage, q: selection_fields(storage, q, scale), q))

    def stored_values(self, num_tokens: int) -> Tensor:
        """`MethodLayer.stored_values` of every layer, [layers * B, Hkv, num_tokens, d]."""
        return self._rows_of(lambda storage: {"values": storage.stored_values(num_tokens)})["values"]

    def _rows_of(self, function: Callable[..., dict[str, Tensor]], *by_layer: Tensor) -> dict[str, Tensor]:
        if not self._stacked:
            return function(self._first, *(x[0] for x in by_layer))

        def one_layer(tensors: list[Tensor], *args: Tensor) -> dict[str, Tensor]:
            return function(_with_tensors(self._first, iter(tensors)), *args)

        with warnings.catch_warnings():
            # An operation that vmap cannot batch runs layer by layer, as all would without it.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            results = torch.func.vmap(one_layer)(self._stacked, *by_layer)
        return {name: value.flatten(0, 1) for name, value in results.items()}


def selection_fields(storage: MethodLayer, q: Tensor, scale: float) -> dict[str, Tensor]:
    """What a storage selects, by the names of `Selection`'s fields, each with all of its rows: what vmap can stack.

    Parameters
    ----------
    storage
        One layer.
    q
        [B, Hq, d].
    scale
        Softmax scale.
    """
    selection = storage.select(q, scale)
    given = {name: value for name, value in vars(selection).items() if value is not None}
    rows = selection.selected.shape[:2]
    return given | {name: given[name].expand(rows) for name in _OPTIONAL_ROWS if name in given}


def signature(storage: Any) -> Any:
    """What must be equal for storages to be stacked: everything in them but the contents of their tensors."""
    if isinstance(storage, Tensor):
        return storage.shape, storage.dtype, storage.device
    if isinstance(storage, _PLAIN):
        return storage
    if not _has_parts(storage):
        return id(storage)
    parts = ((name, signature(part)) for name, part in vars(storage).items() if not isinstance(part, _OWN))
    return type(storage), tuple(parts)


def _has_parts(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (type, RowState, *_PLAIN, *_OWN))


def _tensors(storage: Any) -> list[Tensor]:
    """Tensors of a storage and of the objects it consists of, in the order in which `_with_tensors` takes them."""
    found = []
    for part in vars(storage).values():
        if isinstance(part, Tensor):
            found.append(part)
        elif _has_parts(part):
            found.extend(_tensors(part))
    return found


def _with_tensors(storage: Any, tensors: Iterator[Tensor]) -> Any:
    """A copy of a storage with other tensors."""
    made = copy(storage)
    for name, part in vars(storage).items():
        if isinstance(part, Tensor):
            vars(made)[name] = next(tensors)
        elif _has_parts(part):
            vars(made)[name] = _with_tensors(part, tensors)
    return made
