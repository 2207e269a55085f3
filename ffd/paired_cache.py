"""Two caches as one of twice the rows, so that one decode step of the model, and its weights read once, serves both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ffd.cache import SparseCache
from ffd.cache_layer import DecodeHandle
from ffd.handle import Handle
from ffd.streams import at_once


@dataclass(frozen=True, eq=False)
class PairedHandle(Handle):
    """The handles of one layer of both caches."""

    first: DecodeHandle
    second: DecodeHandle

    @property
    def model_type(self) -> str:
        """Of the one model."""
        return self.first.model_type

    def attend(self, q: Tensor, scale: float) -> Tensor:
        """Decode one step of each cache: q [2B, Hq, d], the first's rows first -> [2B, Hq, d]."""
        of_first, of_second = q.chunk(2)
        first, second = self.first, self.second
        return torch.cat(
            at_once(lambda: first.attend(of_first, scale), lambda: second.attend(of_second, scale), q.device, "pair")
        )


class PairedCache(Cache):
    """Decode steps of two caches; each is begun and prefilled by itself, and keeps its lengths, counters and probe.

    Parameters
    ----------
    first, second
        Caches of one model and as many rows B: rows [0, B) of a step are the first's, rows [B, 2B) the second's.
    """

    def __init__(self, first: SparseCache, second: SparseCache) -> None:
        self.pair = (first, second)
        super().__init__(layers=first.layers)  # they say how far both have decoded

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Hand each cache its rows of one layer's new keys and values [2B, Hkv, 1, d].

        Raises
        ------
        RuntimeError
            If a cache has no prompt yet, or the rows are not those of both.
        """
        rows = sum(cache.rows.lengths.shape[0] for cache in self.pair)
        if key_states.shape[0] != rows or not all(cache.decoding for cache in self.pair):
            raise RuntimeError(f"{key_states.shape[0]} rows on paired caches: expected {rows}, both prefilled before")
        halves = zip(self.pair, key_states.chunk(2), value_states.chunk(2), strict=True)
        handle = PairedHandle(*(cache.update(k, v, layer_idx, *args, **kwargs)[0] for cache, k, v in halves))
        return handle, handle
