"""The contract between a decode method and everything else: engine, cache, runners, tests.

A method is a frozen dataclass of knobs (:class:`Method`) that makes one storage per model layer
(:class:`MethodLayer`, `ffd/method_layer.py`). `ffd.methods` has the names of both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ffd.knob_types import wrong_kind
from ffd.method_layer import Executor, LayerGeometry, MethodLayer, RowState


class KnobError(ValueError):
    """A knob has a value the method does not accept; the message names knob, value and what is accepted."""


def require(condition: bool, knob: str, value: object, accepted: str) -> None:
    """Raise `KnobError` unless ``condition`` holds."""
    if not condition:
        raise KnobError(f"{knob}={value}: expected {accepted}")


@dataclass(frozen=True)
class SearchKnob:
    """The knob along which a method reads more and loses less: what calibration and matching search."""

    name: str
    low: float
    """Least value worth trying; an int makes the knob one."""
    high: float
    """Largest value worth trying; infinity for the context's length."""


@dataclass(frozen=True)
class Method(ABC):
    """Name and knobs of a decode method.

    Subclasses are frozen dataclasses whose fields are the knobs, each followed by a one-line
    docstring, validated in ``__post_init__`` by `require`. A module in ``ffd/methods`` that defines
    one is found by its class attribute ``name``.
    """

    name: ClassVar[str]
    reads_everything: ClassVar[bool] = False
    """True for methods without selection (dense, kivi): keep ratios are 1 by construction."""
    exact_scores: ClassVar[bool] = False
    """True for oracles: whatever their rule keeps are the tokens (units) of largest exact score."""
    search_knob: ClassVar[SearchKnob | None] = None
    """The knob that recall and bytes read never fall with, where there is one."""
    keep_all_knobs: ClassVar[Mapping[str, Any]] = {}
    """Knobs under which the method attends to everything exactly, so that it must equal dense."""
    small_knobs: ClassVar[Mapping[str, Any]] = {}
    """Knobs under which contexts of a few dozen tokens exercise the rule: conformance tests run with them."""

    @abstractmethod
    def new_layer(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> MethodLayer:
        """Allocate the storage of one layer; raises `KnobError` if the knobs do not fit the geometry."""

    @property
    def label(self) -> str:
        """Name in a table: `name`, and what makes two configurations two methods."""
        return self.name

    @property
    def cost_knob(self) -> SearchKnob | None:
        """`search_knob`, unless another knob decides which one it is."""
        return self.search_knob

    @property
    def margins_per_head(self) -> bool:
        """Whether its layers read a margin for each query head from ``delta_nats``, a float32 tensor [Hq]."""
        return "deltas" in self.knobs()

    @property
    def dense_layers(self) -> int:
        """Leading layers this method leaves dense (``skip_layers`` where it has that knob)."""
        return getattr(self, "skip_layers", 0)

    def knobs(self) -> dict[str, Any]:
        """Knob names and values, in declaration order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_knobs(cls, knobs: Mapping[str, Any]) -> Method:
        """Build from a mapping; raises `KnobError` for a knob that the method does not have, or a wrong value."""
        known = {field.name: field.type for field in fields(cls)}
        for knob, value in knobs.items():
            require(knob in known, knob, value, f"a knob of method {cls.name} ({', '.join(sorted(known))})")
        # The method's own check comes first: it knows more of what is accepted than the annotation. It may take True
        # for 1, and fail with a TypeError on what it cannot compare.
        try:
            method = cls(**knobs)
        except TypeError:
            _require_kinds(knobs, known)
            raise
        _require_kinds(knobs, known)
        return method


def _require_kinds(knobs: Mapping[str, Any], annotations: Mapping[str, Any]) -> None:
    """Raise `KnobError` for the first value that is nothing of the kind its annotation names."""
    for knob, value in knobs.items():
        accepted = wrong_kind(annotations[knob], value)
        require(accepted is None, knob, value, str(accepted))
