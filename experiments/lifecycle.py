"""The life of a run: found finished, resumed, failed or ended; what happens in between is the runner's own."""

from __future__ import annotations

import json
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.busy_cores import advice
from experiments.config import RunConfig
from experiments.environment import describe as describe_environment
from experiments.environment import device_class, versions
from experiments.errors import INVALID_EXIT, RunFailedError, UsageError, one_line
from experiments.failures import failure
from experiments.identity import code_fingerprint, run_id
from experiments.progress import console
from experiments.refusals import refusals
from experiments.store import Rows, RunStore
from experiments.tracker import Tracker, make_tracker

__all__ = ["Rows", "StudyRun", "code_and_machine"]


class StudyRun(ABC):
    """A run of samples, prompts or sweep points, each kept as it finishes.

    Parameters
    ----------
    config
        What was asked for.
    identity
        Everything that decides the results; must have ``method.name`` and ``task.name``.
    store
        Where it is kept, if not in a folder of its own held by this process alone.
    """

    def __init__(self, config: RunConfig, identity: dict[str, Any], store: RunStore | None = None) -> None:
        self.config = config
        self.identity = identity
        self.store = store or RunStore(config.root, run_id(identity))
        self.tables: dict[str, Sequence[Mapping[str, Any]]] = {}
        """Per-layer tables that the tracker gets in the end."""

    @property
    def methods(self) -> Sequence[str]:
        """Names of the methods that run, to say which of them ended it by an error."""
        return (self.identity["method"]["name"],)

    @abstractmethod
    def plan(self, done: Rows) -> str:
        """What is still to do, in one line; notes on the run may come before it."""

    @abstractmethod
    def work(self, rows: Rows, tracker: Tracker) -> None:
        """Do what is not in ``rows`` yet, adding to it and to the store row by row."""

    @abstractmethod
    def summarize(self, rows: Rows) -> dict[str, Any]:
        """The summary's own blocks.

        ``problem`` in it makes a run that came to its end invalid, ``lacking`` makes it partial.
        """

    @abstractmethod
    def write_results(self, rows: Rows, summary: dict[str, Any]) -> None:
        """Write tables and figures of a run that came to its end."""

    @abstractmethod
    def show(self, summary: dict[str, Any]) -> None:
        """Print a stored summary."""

    def finished(self) -> Rows:
        """What is done already; called once, before anything is planned."""
        return self.store.finished_samples()

    def settled(self, rows: Rows) -> Rows:
        """All rows when the work is done, those of other processes of the same run included."""
        return rows

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
            self.store.release_reserve()  # still there where the run was killed between its summary and its end
            console.print(f"run {self.store.run_id} is finished; rerun=true repeats it")
            self.show(stored)
            return 0
        if self.config.rerun and not self.config.dry_run:
            self.store.set_aside()
        rows = self.finished()
        console.print(self.plan(rows))
        if self.config.dry_run:
            console.print(f"dry run: nothing was run; results would go to {self.store.folder}")
            return 0
        hint = advice(device_class())
        if hint is not None:
            console.print(hint)
        return self._execute(rows)

    def _execute(self, rows: Rows) -> int:
        self._open(rows)
        tracker = make_tracker(self.config.tracker, self.store.run_id, self.identity, self.config.root)
        try:
            with refusals():
                self.work(rows, tracker)
            with self.store.publishing():
                summary = self._finish(rows)
        except UsageError as error:
            tracker.finish(self._refused(rows, error), {})
            raise
        except KeyboardInterrupt:
            tracker.finish(self._record(rows, "partial", "interrupted; the same command resumes"), {})
            raise
        except Exception as error:
            self.store.release_reserve()
            why, kept = failure(error, self.methods), "finished samples are kept"
            try:
                # The traceback comes second: a disk without room for it may have room for what it came to.
                tracker.finish(self._record(rows, "failed", why), {})
                self.store.write_traceback(traceback.format_exc())
                kept += f", {self.store.traceback_path} says more"
            except OSError as unwritten:
                console.print(f"the failure itself could not be recorded in full ({unwritten.strerror})")
            raise RunFailedError(f"run {self.store.run_id}: {why}; {kept}") from error
        tracker.finish(summary, self.tables)
        self.show(summary)
        console.print(f"results: {self.store.folder}")
        return INVALID_EXIT if summary["status"] == "invalid" else 0

    def _open(self, rows: Rows) -> None:
        """Write what stands in the folder while the run is at work."""
        import yaml

        plain = json.loads(json.dumps(self.identity))  # tuples and mappings as YAML knows them
        try:
            self.store.reserve()
            self.store.traceback_path.unlink(missing_ok=True)
            self.store.write_text("config.yaml", yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
            self.store.write_json("environment.json", describe_environment())
            self._record(rows, "partial", "not finished: running, or killed")
        except OSError as error:
            raise UsageError(f"out={self.config.root}: cannot be written ({error.strerror})") from None

    def _finish(self, rows: Rows) -> dict[str, Any]:
        """Write results; the summary comes last, so that a run that calls itself complete has all its files."""
        rows = self.settled(rows)
        summary = self._summary(rows, "complete", None)
        self.write_results(rows, summary)
        self.store.write_json("summary.json", summary)
        self.store.release_reserve()
        return summary

    def _refused(self, rows: Rows, error: UsageError) -> dict[str, Any]:
        """Record a refusal; a run that could not begin leaves nothing behind."""
        self.store.release_reserve()
        if not rows and self.store.withdraw():
            return {"status": "failed", "reason": one_line(error)}
        return self._record(rows, "failed", one_line(error))

    def _record(self, rows: Rows, status: str, reason: str | None) -> dict[str, Any]:
        with self.store.publishing():
            summary = self._summary(rows, status, reason)
            self.store.write_json("summary.json", summary)
        return summary

    def _summary(self, rows: Rows, status: str, reason: str | None) -> dict[str, Any]:
        published = self.store.published()
        if published is not None:
            return published
        own = self.summarize(rows)
        problem, lacking = own.pop("problem", None), own.pop("lacking", None)
        if status == "complete" and problem is not None:
            status, reason = "invalid", problem
        elif status == "complete" and lacking is not None:
            status, reason = "partial", lacking
        return {
            "run_id": self.store.run_id,
            "status": status,
            "reason": reason,
            "runner": self.config.runner,
            **own,
            "environment": describe_environment(),
        }


def code_and_machine(roots: Sequence[str], packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """The part of an identity that code and machine decide.

    Parameters
    ----------
    roots
        Modules of ``ffd`` and ``eval`` beside those that every run depends on: how a model is loaded and
        where its answers end.
    packages
        Installed packages whose versions decide the results, beside torch, triton and transformers.
    """
    return {
        "device": device_class(),
        "versions": versions(("torch", "triton", "transformers", *packages)),
        "code": code_fingerprint(["eval.models", "eval.answer", *roots]),
    }
