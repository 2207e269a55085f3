"""Samples of one run split over processes, GPUs or nodes: ``shard=1/4`` to ``shard=4/4``.

Shards share the run's id. Each writes under ``<run id>/shards/<i>-of-<n>`` alone and runs every n-th
sample; whoever finds all samples finished moves them to where an undivided run keeps them. What is
finished counts whichever shard did it, so the split may change between two starts.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.errors import UsageError
from experiments.fidelity_log import FidelityLog
from experiments.files import held
from experiments.store import Rows, RunStore, read_samples, write_samples


@dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count``, from 1."""

    index: int
    count: int

    @classmethod
    def parse(cls, value: str | None) -> Shard | None:
        """From ``i/n`` as `RunConfig` holds it; None stays None."""
        if value is None:
            return None
        index, _, count = value.partition("/")
        return cls(int(index), int(count))

    def own(self, samples: Sequence[Any]) -> Sequence[Any]:
        """Every ``count``-th sample: tasks are shared out evenly."""
        return samples[self.index - 1 :: self.count]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


class ShardStore(RunStore):
    """A run's folder held by several shards at a time.

    Raises
    ------
    UsageError
        If an undivided run, the same shard or another split of the run is being written.
    """

    def __init__(self, root: Path, run_id: str, shard: Shard) -> None:
        self.shard = shard
        self._publishing = False
        super().__init__(root, run_id)

    @property
    def work(self) -> Path:
        """Where this shard writes its samples."""
        return self.folder / "shards" / f"{self.shard.index}-of-{self.shard.count}"

    def take_locks(self) -> None:
        """Share the run with other shards of this split, and hold this shard alone."""
        super().take_locks(shared=True)
        self.work.mkdir(parents=True, exist_ok=True)
        self._own = (self.work / ".lock").open("w")
        try:
            fcntl.flock(self._own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"shard={self.shard} of run {self.run_id}: another process is writing it") from None
        for path in self.folder.glob("shards/*/.lock"):
            if path.parent.name.endswith(f"-of-{self.shard.count}"):
                continue
            with path.open("w") as other:
                try:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise UsageError(
                        f"shard={self.shard}: run {self.run_id} is being written as {path.parent.name}; "
                        "wait for it, or use the same split"
                    ) from None

    def finished_samples(self) -> Rows:
        """Samples done by anyone; only this shard's own torn line is cut off."""
        rows = read_samples(self.folder / "samples.jsonl")
        for path in sorted(self.folder.glob("shards/*/samples.jsonl")):
            if path != self.samples_path:
                rows = {**read_samples(path), **rows}
        return {**super().finished_samples(), **rows}

    def latest(self, rows: Rows) -> Rows:
        """Samples that any shard has finished meanwhile."""
        return self.finished_samples()

    def withdraw(self) -> bool:
        """Nothing: other shards may be at work."""
        return False

    def set_aside(self) -> None:
        """Refuse: other shards may be at work."""
        raise UsageError(f"rerun=true: not together with shard={self.shard}; repeat the run without shard")

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Hold the files that all shards write: the summary and the merged samples."""
        if self._publishing:
            yield
            return
        with held(self.folder / ".publish"):
            self._publishing = True
            try:
                yield
            finally:
                self._publishing = False

    def published(self) -> dict[str, Any] | None:
        """The summary of the finished run, if another shard has finished it."""
        summary = self.summary()
        return summary if summary is not None and summary["status"] in ("complete", "invalid") else None

    def discard_if_empty(self) -> None:
        """Remove this shard's folder if it finished no sample and says of no error."""
        if not self.samples_path.exists() and not self.traceback_path.exists():
            shutil.rmtree(self.work, ignore_errors=True)

    def close(self) -> None:
        """Release files and locks."""
        super().close()
        self._own.close()


def open_store(root: Path, run_id: str, shard: Shard | None) -> RunStore:
    """The store of a run, or of one shard of it."""
    return RunStore(root, run_id) if shard is None else ShardStore(root, run_id, shard)


def fidelity_elsewhere(store: RunStore) -> frozenset[str]:
    """Samples whose fidelity is in another folder of the run than this process's own."""
    logs = (path for path in _fidelity_folders(store.folder) if path != store.work / "fidelity")
    return frozenset(name for path in logs for name in FidelityLog.covered_by(path))


def merged_fidelity(folder: Path, unit: int) -> FidelityLog:
    """Fidelity of all shards together, in memory only."""
    log = FidelityLog(folder / "fidelity", unit)
    for path in _fidelity_folders(folder)[1:]:
        log.state = log.state.merge(FidelityLog(path, unit).state)
    return log


def merge_shards(folder: Path, rows: Rows, order: Sequence[tuple[str, int]], unit: int) -> Rows:
    """Move what the shards of a run finished to where an undivided run keeps it.

    Killed anywhere, it can be called again: samples count once, and so does fidelity.

    Parameters
    ----------
    folder
        The run's.
    rows
        Finished samples as far as they are known, in the order in which ``samples.jsonl`` has them.
    order
        Task and index of every sample, in the run's order.
    unit
        Tokens per page of the fidelity metrics.

    Returns
    -------
    Rows
        All finished samples, in the run's order.
    """
    divided = (folder / "shards").is_dir()
    found = dict(rows)
    for path in sorted(folder.glob("shards/*/samples.jsonl")):
        found = {**read_samples(path), **found}
    ordered = {key: found[key] for key in order if key in found}
    if ordered and (divided or list(ordered) != list(rows)):
        write_samples(folder / "samples.jsonl", list(ordered.values()))
    if divided:
        log = FidelityLog(folder / "fidelity", unit)
        for path in _fidelity_folders(folder)[1:]:
            log.absorb(FidelityLog(path, unit))
        shutil.rmtree(folder / "shards")
    return ordered


def _fidelity_folders(folder: Path) -> list[Path]:
    return [folder / "fidelity", *sorted(folder.glob("shards/*/fidelity"))]
