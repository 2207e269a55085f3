"""Fidelity of a run, added up sample by sample on the disk, so that a resumed run continues the sum."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.fidelity import FidelityProbe, FidelityState, summary, table, write_table
from experiments.errors import UsageError
from experiments.files import read_json, write_atomically


def page_unit(method: Mapping[str, Any]) -> int:
    """Tokens of a method's own sub-block, block or page; 16 where its knobs have none."""
    return int(method.get("sub_block") or method.get("block_size") or method.get("page_size") or 16)


class FidelityLog:
    """Accumulated state of the samples that finished.

    The sum and the list of samples in it must change together: each sum gets a file of its own, and
    ``current.json``, replaced atomically, names the valid one with its samples.

    Parameters
    ----------
    folder
        Where the files are kept; absent before the first sample.
    unit
        Tokens per page of the page-level metrics: the method's own block or page.
    elsewhere
        Samples that another log of the same run covers; keeping them again does nothing.
    """

    def __init__(self, folder: Path, unit: int, elsewhere: frozenset[str] = frozenset()) -> None:
        self.folder = folder
        self._elsewhere = elsewhere
        self.probe = FidelityProbe(unit)
        pointer = folder / "current.json"
        current = read_json(pointer)
        self._covered: list[str] = []
        self._file: str | None = None
        self.state = FidelityState(self.probe.unit)
        if current is not None:
            try:
                self._covered, self._file = list(current["samples"]), current["file"]
                if self._file is not None:
                    self.state = FidelityState.load(folder / self._file)
            except (KeyError, TypeError, ValueError, OSError) as error:
                raise UsageError(
                    f"{pointer}: damaged, or the file it names is ({type(error).__name__}); repeat with rerun=true"
                ) from None

    def start(self) -> None:
        """A sample begins."""
        self.probe.start()

    def keep(self, task: str, index: int) -> None:
        """The sample finished: add what was observed, once, and put the sum on the disk."""
        observed, name = self.probe.take(), f"{task}/{index}"
        known = name in self._covered or name in self._elsewhere
        if not known and (observed.layers or observed.dense_calls):
            self._add(observed, [name])
        elif known:
            self._remove_earlier()  # a kill came before the sample was stored, and perhaps before this was done

    def absorb(self, other: FidelityLog) -> None:
        """Add another log of the same run, once; its samples must all be new, or all be in already.

        Raises
        ------
        ValueError
            If only some of them are in: sums cannot be taken apart.
        """
        new = [name for name in other._covered if name not in self._covered]
        if not new:
            return
        if len(new) < len(other._covered):
            raise ValueError(f"{other.folder}: shares samples with {self.folder}")
        self._add(other.state, new)

    @staticmethod
    def covered_by(folder: Path) -> list[str]:
        """Names (``task/index``) of the samples in a log."""
        current = read_json(folder / "current.json")
        return list(current["samples"]) if current else []

    def _add(self, observed: FidelityState, names: list[str]) -> None:
        self.state = self.state.merge(observed)
        self._covered.extend(names)
        self._file = f"sum-of-{len(self._covered)}.safetensors"
        self.folder.mkdir(exist_ok=True)
        self.state.save(self.folder / self._file)
        pointer = json.dumps({"file": self._file, "samples": self._covered})
        write_atomically(self.folder / "current.json", pointer.encode())
        self._remove_earlier()

    def _remove_earlier(self) -> None:
        for path in self.folder.glob("sum-of-*.safetensors"):
            if path.name != self._file:
                path.unlink(missing_ok=True)

    def summary(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Headline figures, and under dotted names the reasons of those that are null."""
        figures = summary(self.state)
        reasons = figures.pop("null_reasons", {})
        return figures, {f"fidelity.{name}": reason for name, reason in reasons.items()}

    def table(self) -> list[dict[str, Any]]:
        """One row per layer and query head."""
        return table(self.state) if self.state.layers else []

    def write_table(self, path: Path) -> None:
        """Write the table as CSV, if anything was probed."""
        rows = self.table()
        if rows:
            write_table(path, rows)
