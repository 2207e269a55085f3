"""Run, resume or show one evaluation by lm-eval."""

from __future__ import annotations

import json
from typing import Any

from eval.lm_harness.arguments import HarnessError
from eval.lm_harness.tasks import reset_fewshot
from eval.models import ModelError, load_model
from experiments.config import RunConfig
from experiments.environment import describe as describe_environment
from experiments.errors import INVALID_EXIT, RunFailedError, UsageError, one_line
from experiments.estimate import estimate
from experiments.identity import run_id
from experiments.lm_eval import summary as summarise
from experiments.lm_eval.prepare import PreparedEvaluation, Request, prepare
from experiments.lm_eval.rows import StoreJournal, json_lines, loglikelihood_rows, score_rows, without_samples
from experiments.progress import console
from experiments.store import RunStore
from experiments.summary import layer_table
from experiments.table import print_summary
from experiments.tracker import Tracker, make_tracker


def run_lm_eval(config: RunConfig) -> int:
    """Run, resume or just show one evaluation by lm-eval; returns the exit code."""
    prepared = prepare(config)
    store = RunStore(config.root, run_id(prepared.identity))
    try:
        return LmEvalRun(prepared, store).run()
    finally:
        if store.summary() is None:
            store.discard_if_empty()
        store.close()


class LmEvalRun:
    """One evaluation on its way from requests to a summary."""

    def __init__(self, prepared: PreparedEvaluation, store: RunStore) -> None:
        self.prepared = prepared
        self.config = prepared.config
        self.store = store

    def run(self) -> int:
        """Carry the run as far as it goes; returns the exit code."""
        stored = None if self.config.rerun else self.store.summary()
        if stored is not None and stored["status"] == "complete":
            console.print(f"run {self.store.run_id} is finished; rerun=true repeats it")
            print_summary(stored)
            return 0
        if self.config.rerun and not self.config.dry_run:
            self.store.set_aside()
        for note in summarise.notes(self.prepared):
            console.print(note)
        done = set(self.store.finished_samples())
        console.print(estimate(self.prepared, self._pending(done)).line() + (f", {len(done)} done" if done else ""))
        if self.config.dry_run:
            console.print(f"dry run: nothing was run; results would go to {self.store.folder}")
            return 0
        return self._execute()

    def _pending(self, done: set[tuple[str, int]]) -> list[Request]:
        """Requests that are left; of a task, the first generation requests are the finished ones."""
        finished = {task: sum(key[0] == task for key in done) for task in self.prepared.tasks.names}
        pending = []
        for request in self.prepared.requests:
            if request.max_new_tokens and finished[request.task]:
                finished[request.task] -= 1
            else:
                pending.append(request)
        return pending

    def _execute(self) -> int:
        import yaml

        identity = self.prepared.identity
        plain = json.loads(json.dumps(identity))  # tuples and mappings as YAML knows them
        tracker = make_tracker(self.config.tracker, self.store.run_id, identity, self.config.root)
        journal = StoreJournal(self.store, tracker)
        try:
            self.store.reserve()
            self.store.write_text("config.yaml", yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
            self.store.write_json("environment.json", describe_environment())
            self._summarize(journal, None, "partial", "not finished: running, or killed")
            results = self._evaluate(journal)
        except KeyboardInterrupt:
            tracker.finish(self._summarize(journal, None, "partial", "interrupted; the same command resumes"), {})
            raise
        except Exception as error:
            raise self._failed(journal, tracker, error) from error
        return self._finish(journal, tracker, results)

    def _evaluate(self, journal: StoreJournal) -> dict[str, Any]:
        """Hand model and tasks to lm-eval; returns its results, samples included."""
        from lm_eval import evaluate

        from eval.lm_harness.model import SparseDecodeLM

        task, tasks = self.prepared.task, self.prepared.tasks
        lm = SparseDecodeLM(
            load_model(self.prepared.spec),
            self.prepared.method,
            executor=self.config.executor,
            journal=journal,
            **({} if task.max_length is None else {"max_length": task.max_length}),
        )
        reset_fewshot(tasks, task)
        results: dict[str, Any] = evaluate(
            lm,
            tasks.loaded,
            limit=task.limit,
            system_instruction=task.system_instruction,
            apply_chat_template=task.apply_chat_template,
            fewshot_as_multiturn=task.multiturn,
            confirm_run_unsafe_code=task.confirm_run_unsafe_code,
        )
        return results

    def _finish(self, journal: StoreJournal, tracker: Tracker, results: dict[str, Any]) -> int:
        score_rows(journal.rows, results)
        rows = journal.ordered(self.prepared.tasks.names)
        if rows:
            self.store.write_text("samples.jsonl", json_lines(rows))
        documents = loglikelihood_rows(results, self.prepared.tasks)
        if documents:
            self.store.write_text("loglikelihood.jsonl", json_lines(documents))
        self.store.write_json("lm_eval.json", without_samples(results))
        problem = summarise.problem(rows)
        status = "complete" if problem is None else "invalid"
        summary = self._summarize(journal, results, status, problem)
        layers = layer_table(rows)
        self.store.write_json("layers.json", layers)
        self.store.release_reserve()
        tracker.finish(summary, {"layers": layers})
        print_summary(summary)
        console.print(f"results: {self.store.folder}")
        return INVALID_EXIT if status == "invalid" else 0

    def _failed(self, journal: StoreJournal, tracker: Tracker, error: Exception) -> Exception:
        """Record a failure; returns what to raise."""
        from ffd.cache import UnsupportedModelError
        from ffd.methods import KnobError

        self.store.release_reserve()
        usage = isinstance(error, ModelError | HarnessError | KnobError | UnsupportedModelError)
        if usage and not journal.rows:
            tracker.finish({"status": "failed"}, {})
            (self.store.folder / "summary.json").unlink(missing_ok=True)  # it could not begin: nothing stays behind
            return UsageError(one_line(error))
        try:
            summary = self._summarize(journal, None, "failed", f"{type(error).__name__}: {one_line(error)}")
            tracker.finish(summary, {})
        except OSError:
            console.print("the failure itself could not be recorded: the disk is full")
        return RunFailedError(f"run {self.store.run_id}: {one_line(error)}; finished answers are kept")

    def _summarize(
        self, journal: StoreJournal, results: dict[str, Any] | None, status: str, reason: str | None
    ) -> dict[str, Any]:
        rows = journal.ordered(self.prepared.tasks.names)
        summary = summarise.summary(self.prepared, rows, results, self.store, status, reason)
        self.store.write_json("summary.json", summary)
        return summary
