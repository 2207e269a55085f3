"""The dense attention that rows of one shape stand beside: what it must be, and what of it is missing."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from functools import cached_property

from experiments.kernel import baselines
from experiments.kernel.baselines import Library
from experiments.kernel.grid import Entry, Mode, Shape
from experiments.kernel.rows import Row, label, refusal_label
from experiments.kernel.session import Session
from experiments.kernel.stages import whole_step
from ffd.methods.dense import Dense

DENSE = Entry(Dense(), 1.0)


class Beside:
    """Ours and the libraries' dense attention at one shape.

    Parameters
    ----------
    shape
        What is timed.
    session
        What is measured already.
    """

    def __init__(self, shape: Shape, session: Session) -> None:
        self.shape, self.session = shape, session

    @cached_property
    def libraries(self) -> dict[str, Library | str]:
        """Dense kernels of others, or why there are none."""
        return dict(baselines.libraries(self.shape.B))

    @property
    def names(self) -> tuple[str, ...]:
        """Ours first: it has the reference for the others."""
        return DENSE.method.label, *self.libraries

    def label(self, name: str, mode: Mode) -> str:
        """Label of a baseline's row."""
        step = baselines.STEP if name in self.libraries else whole_step(DENSE.method, self.shape)
        return label(f"{name} kept=1", self.shape, mode, step)

    def refusal(self, name: str) -> str:
        """Label of a baseline's refusal, whatever the mode."""
        return f"{name} {self.shape.label}" if name in self.libraries else refusal_label(DENSE, self.shape)

    def lacks(self, modes: Sequence[Mode], timed: Container[str]) -> bool:
        """Whether any baseline has neither a time in every mode nor a refusal that holds."""
        tried = [name for name in self.names if not self.session.is_refused(self.refusal(name))]
        return any(
            self.session.failed_before(self.refusal(name)) or any(self.label(name, mode) not in timed for mode in modes)
            for name in tried
        )

    def is_timed(self, name: str, mode: Mode) -> bool:
        """Whether a label has a row beside every baseline that has one.

        A baseline that was wrong when the row was timed may have come later: the row would call another the fastest.
        """
        stored = self.session.items.get(name)
        return isinstance(stored, Row) and (stored.beside is None or self._timed(mode) <= set(stored.beside))

    def _timed(self, mode: Mode) -> set[str]:
        known = self.session.items.keys() | self.session.dense.keys()
        return {
            name
            for name in self.names
            if self.label(name, mode) in known and not self.session.is_refused(self.refusal(name))
        }

    def beside(self, row: Row) -> Row:
        """The row with this process's dense times of the same shape and way of timing."""
        alike = [other for other in self.session.dense.values() if other.conditions == row.conditions]
        times = {other.method: other.time_us for other in alike}
        fastest = min(times.values(), default=None)
        return replace(row, sdpa_flash_us=times.get("sdpa_flash"), best_dense_us=fastest, beside=list(times))
