"""One measurement, and one that could not be made: what the record holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from experiments.kernel.grid import Entry, Mode, Shape

DENSE_RULE = "keys and values"
"""Name of dense attention's bytes."""
WHOLE = {"attend", "reduce"}
"""Stages that every whole step has, and no launch alone."""


@dataclass(frozen=True)
class Row:
    """One measurement; the fields of the record."""

    method: str
    knobs: dict[str, Any]
    storage: str
    B: int
    T: int
    Hq: int
    Hkv: int
    d: int
    dtype: str
    trace: str
    """Where captured keys come from; nothing where they are planted."""
    kept_target: float | None
    """None where captured keys decide."""
    kept: float
    """Measured fraction of tokens read, union per kv head, mean over kv heads."""
    source: str
    """planted, or captured."""
    timing: str
    l2: str
    step: list[str]
    """Stages in the timed step."""
    time_us: float
    bytes: float
    """What must be read, whatever this kernel reads."""
    bytes_rule: str
    """How ``bytes`` was found."""
    floor_us: float
    """``bytes`` over the measured read bandwidth."""
    efficiency: float
    sdpa_flash_us: float | None
    best_dense_us: float | None
    """Fastest dense row of the same shape and way of timing: ours or a library's."""
    rel_error: float
    """Against the fp32 reference over the same kept set, ||out - ref|| / ||ref||; the worst timed layer's."""
    ledger_error: float
    """Difference of the ledger from its recount, as a share; 0 where they are equal."""
    sparse_steps: float
    """Steps that the ledger counted on the method's path for the one that was made."""
    beside: list[str] | None = None
    """Dense rows that the same process timed at the same shape and way of timing, the row itself included:
    ``best_dense_us`` is the fastest of these. None in records that do not say.
    """

    @property
    def label(self) -> str:
        """Identity of the row in its run."""
        entry = self.method if self.kept_target is None else f"{self.method} kept={self.kept_target:g}"
        return label(entry, self.shape, self.mode, " ".join(self.step))

    @property
    def mode(self) -> Mode:
        """How it was timed."""
        return Mode(self.timing, self.l2)

    @property
    def shape(self) -> Shape:
        """What was timed."""
        return Shape(self.B, self.T, self.Hq, self.Hkv, self.d, self.dtype, self.trace)

    @property
    def whole(self) -> bool:
        """Whether it is a whole step, not one launch of it."""
        return set(self.step) >= WHOLE

    @property
    def is_dense(self) -> bool:
        """Whether it is a whole dense step by exact attention, ours or a library's."""
        return self.whole and self.bytes_rule == DENSE_RULE

    @property
    def conditions(self) -> tuple[Any, ...]:
        """What two rows must share to be compared."""
        return self.shape, self.mode

    def as_dict(self) -> dict[str, Any]:
        """As it is committed."""
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Refusal:
    """What was asked for and has no row."""

    label: str
    reason: str
    wrong: bool
    """The gate found the step wrong; otherwise it is not to be had here."""

    def as_dict(self) -> dict[str, Any]:
        """As it is committed."""
        return {"refused": self.label, "reason": self.reason, "wrong": self.wrong}


Item = Row | Refusal


def label(entry: str, shape: Shape, mode: Mode, step: str) -> str:
    """Identity of a row in its run."""
    return f"{entry} {shape.label} {mode.timing} {mode.l2}: {step}"


def refusal_label(entry: Entry, shape: Shape) -> str:
    """Identity of a method that cannot be timed at a shape, whatever the mode."""
    return f"{entry.label} {shape.label}"
