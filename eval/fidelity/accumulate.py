"""Sums and counts of every metric per layer and query head: on the device while running, mergeable, savable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from eval.fidelity.catalogue import INDEX, METRICS
from eval.fidelity.metrics import Observation

FORMAT = "ffd-fidelity/1"
NAMES = tuple(metric.name for metric in METRICS)
WITH_HISTOGRAM = tuple(metric for metric in METRICS if metric.histogram is not None)
EDGES = {
    "magnitude": torch.logspace(-7, 2, 145, dtype=torch.float64),  # 16 bins a decade: each 15.5 % wide
    "signed": torch.linspace(-18, 18, 145, dtype=torch.float64),  # a quarter of a nat each
}
"""Inner edges of the histograms' bins; the first and the last bin are open."""
BINS = 146
_SUMS = ("value_sum", "weighted_sum", "weight", "count", "histogram", "steps")


@dataclass
class FidelityState:
    """What a number of observed decode steps add up to.

    Merging adds sums and takes extremes, so it is associative and commutative: exactly in counts,
    histograms and extremes, to the last bit of float64 in sums.
    """

    unit: int
    """Tokens per page of the page-level metrics."""
    layers: tuple[int, ...] = ()
    """Model layers that decode by the method, one per row of the tensors; empty before the first step."""
    num_heads: int = 0
    """Query heads."""
    dense_calls: int = 0
    """Layer-steps seen at layers that are dense by configuration, which are not observed."""
    device: torch.device | str = "cpu"
    value_sum: Tensor = field(init=False)
    """float64 [M, L, Hq]: sum of values."""
    weighted_sum: Tensor = field(init=False)
    """float64 [M, L, Hq]: sum of weight times value."""
    weight: Tensor = field(init=False)
    """float64 [M, L, Hq]."""
    count: Tensor = field(init=False)
    """int64 [M, L, Hq]: observations with a value."""
    minimum: Tensor = field(init=False)
    """float64 [M, L, Hq]; infinity before the first observation."""
    maximum: Tensor = field(init=False)
    """float64 [M, L, Hq]; -infinity before the first observation."""
    histogram: Tensor = field(init=False)
    """int64 [K, L, Hq, BINS], of the metrics in ``WITH_HISTOGRAM``."""
    steps: Tensor = field(init=False)
    """int64 [L]: decode steps observed, one per active row."""

    def __post_init__(self) -> None:
        shape = (len(NAMES), len(self.layers), self.num_heads)

        def full(value: float) -> Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=self.device)

        self.value_sum, self.weighted_sum, self.weight = full(0), full(0), full(0)
        self.minimum, self.maximum = full(torch.inf), full(-torch.inf)
        self.count = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.histogram = torch.zeros(len(WITH_HISTOGRAM), *shape[1:], BINS, dtype=torch.int64, device=self.device)
        self.steps = torch.zeros(len(self.layers), dtype=torch.int64, device=self.device)
        self._edges = {kind: edges.to(self.device) for kind, edges in EDGES.items()}

    @property
    def excluded(self) -> Tensor:
        """int64 [M, L, Hq]: observations without a value."""
        return self.steps[None, :, None] - self.count

    def add(self, layer: int, observed: Sequence[Mapping[str, Observation]], active: Tensor) -> None:
        """Add one step of layers that follow each other, without waiting for the device.

        Parameters
        ----------
        layer
            Row of the tensors, not the model's layer index; the first of the layers.
        observed
            Parts, each of one or more layers: by metric name, the rows of one layer after those of the layer before. A
            metric that is missing has no value.
        active
            bool [B]: rows that still decode.
        """
        given, weight, defined = (torch.cat(parts, dim=1) for parts in zip(*map(self._stacked, observed), strict=True))
        given, weight, defined = (x.unflatten(1, (-1, active.shape[0])) for x in (given, weight, defined))
        defined = defined & active[:, None] & given.isfinite()
        value, weight = given.where(defined, 0.0), weight.where(defined, 0.0)
        counted = defined.long()
        own = slice(layer, layer + given.shape[1])
        self.value_sum[:, own].add_(value.sum(dim=2))
        self.weighted_sum[:, own].add_((value * weight).sum(dim=2))
        self.weight[:, own].add_(weight.sum(dim=2))
        self.count[:, own].add_(counted.sum(dim=2))
        self.steps[own].add_(active.sum())
        for extreme, merged, seen in (
            (self.minimum, torch.minimum, given.where(defined, torch.inf).amin(dim=2)),
            (self.maximum, torch.maximum, given.where(defined, -torch.inf).amax(dim=2)),
        ):
            merged(extreme[:, own], seen, out=extreme[:, own])
        for row, metric in enumerate(WITH_HISTOGRAM):
            assert metric.histogram is not None
            which = INDEX[metric.name]
            bins = torch.bucketize(value[which].mT.contiguous(), self._edges[metric.histogram])
            self.histogram[row, own].scatter_add_(2, bins, counted[which].mT)

    def _stacked(self, observed: Mapping[str, Observation]) -> tuple[Tensor, Tensor, Tensor]:
        """Values, weights and where they are defined, of all metrics: float64, float64 and bool [M, layers * B, Hq]."""
        shape = (len(next(iter(observed.values())).value), self.num_heads)
        nothing = torch.full(shape, torch.nan, dtype=torch.float64, device=self.device)
        absent, one, everywhere = Observation(nothing), torch.ones_like(nothing), nothing.isnan()
        entries = [observed.get(name, absent) for name in NAMES]

        def together(tensors: Iterable[Tensor]) -> Tensor:  # of one dtype, which takes one launch
            return torch.stack([x if x.shape == shape else x.expand(shape) for x in tensors])

        return (
            together(entry.value.double() for entry in entries),
            together(one if entry.weight is None else entry.weight.double() for entry in entries),
            together(everywhere if entry.defined is None else entry.defined for entry in entries),
        )

    def to(self, device: torch.device | str) -> FidelityState:
        """The same state on another device."""
        return self._with({name: value.to(device) for name, value in self._tensors().items()}, self, device)

    def merge(self, other: FidelityState) -> FidelityState:
        """The state after both; a state that observed no layer is neutral.

        Raises
        ------
        ValueError
            If the two were observed with different page units or on models of different shape.
        """
        if self.unit != other.unit:
            raise ValueError(f"unit={other.unit}: cannot merge with fidelity observed with unit={self.unit}")
        if not self.layers or not other.layers:
            whole, empty = (self, other) if self.layers else (other, self)
            merged = whole._with(whole._tensors(), whole, whole.device)
            merged.dense_calls += empty.dense_calls
            return merged
        if (self.layers, self.num_heads) != (other.layers, other.num_heads):
            raise ValueError(
                f"layers={list(other.layers)}, heads={other.num_heads}: cannot merge with fidelity of "
                f"layers={list(self.layers)}, heads={self.num_heads}"
            )
        mine, theirs = self._tensors(), other._tensors()
        sums = {name: mine[name] + theirs[name] for name in _SUMS}
        extremes = {
            "minimum": mine["minimum"].minimum(theirs["minimum"]),
            "maximum": mine["maximum"].maximum(theirs["maximum"]),
        }
        merged = self._with(sums | extremes, self, self.device)
        merged.dense_calls += other.dense_calls
        return merged

    def save(self, path: Path) -> None:
        """Write to a safetensors file; the old file stays whole until the new one is complete."""
        from safetensors.torch import save_file

        description = {
            "format": FORMAT,
            "metrics": list(NAMES),
            "unit": self.unit,
            "layers": list(self.layers),
            "num_heads": self.num_heads,
            "dense_calls": self.dense_calls,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            tensors = {name: value.cpu().contiguous() for name, value in self._tensors().items()}
            save_file(tensors, partial, metadata={"fidelity": json.dumps(description)})
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> FidelityState:
        """Read what `save` wrote.

        Raises
        ------
        ValueError
            If the file is not a fidelity state of this version's metrics.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                description = json.loads((file.metadata() or {}).get("fidelity", "{}"))
                if description.get("format") != FORMAT or tuple(description["metrics"]) != NAMES:
                    raise ValueError(f"{path}: not a fidelity file of format {FORMAT} with this version's metrics")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError as error:
            raise ValueError(f"{path}: damaged fidelity file ({error})") from error
        state = cls(
            description["unit"], tuple(description["layers"]), description["num_heads"], description["dense_calls"]
        )
        return cls._with(tensors, state, "cpu")

    @classmethod
    def _with(cls, tensors: Mapping[str, Tensor], like: FidelityState, device: torch.device | str) -> FidelityState:
        state = cls(like.unit, like.layers, like.num_heads, like.dense_calls, device)
        for name, value in tensors.items():
            getattr(state, name).copy_(value)
        return state

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.init}
