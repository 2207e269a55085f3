"""The life of a study's run: found finished, resumed, failed or ended; what happens in between is the study's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from experiments.config import RunConfig
from experiments.environment import describe as describe_environment
from experiments.environment import device_class, versions
from experiments.errors import INVALID_EXIT, RunFailedError, UsageError, one_line
from experiments.identity import code_fingerprint, run_id
from experiments.progress import console
from experiments.store import RunStore
from experiments.tracker import Tracker, make_tracker

Rows = dict[tuple[str, int], dict[str, Any]]
"""Finished rows of ``samples.jsonl`` by task and index, in the order in which they finished."""


class StudyRun(ABC):
    """A run of prompts or sweep points, each kept as it finishes.

    Parameters
    ----------
    config
        What was asked for.
    identity
        Everything that decides the results; must have ``method.name`` and ``task.name``.
    """

    def __init__(self, config: RunConfig, identity: dict[str, Any]) -> None:
        self.config = config
        self.identity = identity
        self.store = RunStore(config.root, run_id(identity))

    @abstractmethod
    def plan(self, done: Rows) -> str:
        """What is still to do, in one line."""

    @abstractmethod
    def work(self, rows: Rows, tracker: Tracker) -> None:
        """Do what is not in ``rows`` yet, adding to it and to the store row by row."""

    @abstractmethod
    def summarize(self, rows: Rows) -> dict[str, Any]:
        """The summary's own blocks; ``problem`` in it makes the run invalid."""

    @abstractmethod
    def write_results(self, rows: Rows, summary: dict[str, Any]) -> None:
        """Write tables and figures of a finished run."""

    @abstractmethod
    def show(self, summary: dict[str, Any]) -> None:
        """Print a stored summary."""

    def run(self) -> int:
        """Carry the run as far as it goes; returns the exit code."""
        try:
            return self._run()
        finally:
            self.store.discard_if_empty()
            self.store.close()

    def _run(self) -> int:
        stored = None if self.config.rerun else self.store.summary()
        if stored is not None and stored["status"] == "complete":
            console.print(f"run {self.store.run_id} is finished; rerun=true repeats it")
            self.show(stored)
            return 0
        if self.config.rerun and not self.config.dry_run:
            self.store.set_aside()
        rows = self.store.finished_samples()
        console.print(self.plan(rows))
        if self.config.dry_run:
            console.print(f"dry run: nothing was run; results would go to {self.store.folder}")
            return 0
        return self._execute(rows)

    def _execute(self, rows: Rows) -> int:
        import yaml

        try:
            self.store.reserve()
            self.store.write_text("config.yaml", yaml.safe_dump(self.identity, sort_keys=False, allow_unicode=True))
            self.store.write_json("environment.json", describe_environment())
            self._record(rows, "partial", "not finished: running, or killed")
        except OSError as error:
            raise UsageError(f"out={self.config.root}: cannot be written ({error.strerror})") from None
        tracker = make_tracker(self.config.tracker, self.store.run_id, self.identity, self.config.root)
        try:
            self.work(rows, tracker)
            summary = self._record(rows, "complete", None)
            self.write_results(rows, summary)
        except UsageError:
            raise
        except KeyboardInterrupt:
            tracker.finish(self._record(rows, "partial", "interrupted; the same command resumes"), {})
            raise
        except Exception as error:
            self.store.release_reserve()
            tracker.finish(self._record(rows, "failed", f"{type(error).__name__}: {one_line(error)}"), {})
            raise RunFailedError(f"run {self.store.run_id}: {one_line(error)}; finished rows are kept") from error
        self.store.release_reserve()
        tracker.finish(summary, {})
        self.show(summary)
        console.print(f"results: {self.store.folder}")
        return INVALID_EXIT if summary["status"] == "invalid" else 0

    def _record(self, rows: Rows, status: str, reason: str | None) -> dict[str, Any]:
        own = self.summarize(rows)
        problem = own.pop("problem", None)
        if status == "complete" and problem is not None:
            status, reason = "invalid", problem
        summary = {
            "run_id": self.store.run_id,
            "status": status,
            "reason": reason,
            "runner": self.config.runner,
            **own,
            "environment": describe_environment(),
        }
        self.store.write_json("summary.json", summary)
        return summary


def code_and_machine(roots: list[str]) -> dict[str, Any]:
    """The part of an identity that code and machine decide; ``roots`` are modules of ``ffd`` and ``eval``."""
    return {
        "device": device_class(),
        "versions": versions(("torch", "triton", "transformers")),
        "code": code_fingerprint(roots),
    }
