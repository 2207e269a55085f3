"""Run, resume or show one evaluation by lm-eval."""

from __future__ import annotations

from typing import Any

from eval.lm_harness.arguments import HarnessError
from eval.lm_harness.tasks import reset_fewshot
from eval.models import load_model
from experiments.config import RunConfig
from experiments.estimate import estimate
from experiments.lifecycle import Rows, StudyRun
from experiments.lm_eval import summary as summarise
from experiments.lm_eval.prepare import PreparedEvaluation, Request, prepare
from experiments.lm_eval.rows import StoreJournal, in_order, json_lines, loglikelihood_rows, score_rows, without_samples
from experiments.refusals import refusals
from experiments.summary import layer_table
from experiments.table import print_summary
from experiments.tracker import Tracker


def run_lm_eval(config: RunConfig) -> int:
    """Run, resume or just show one evaluation by lm-eval; returns the exit code."""
    return LmEvalRun(prepare(config)).run()


class LmEvalRun(StudyRun):
    """One evaluation on its way from requests to a summary."""

    def __init__(self, prepared: PreparedEvaluation) -> None:
        super().__init__(prepared.config, prepared.identity)
        self.prepared = prepared
        self.harness: dict[str, Any] | None = None
        """lm-eval's results, samples included; None before its end."""
        self.broken_scores = 0
        """Loglikelihoods that were not finite."""

    def plan(self, done: Rows) -> str:
        """How each task runs, then requests, tokens and time."""
        line = estimate(self.prepared, self._pending(done)).line() + (f", {len(done)} done" if done else "")
        return "\n".join([*summarise.notes(self.prepared), line])

    def _pending(self, done: Rows) -> list[Request]:
        """Requests that are left; of a task, the first generation requests are the finished ones."""
        finished = {task: sum(key[0] == task for key in done) for task in self.prepared.tasks.names}
        pending = []
        for request in self.prepared.requests:
            if request.max_new_tokens and finished[request.task]:
                finished[request.task] -= 1
            else:
                pending.append(request)
        return pending

    def work(self, rows: Rows, tracker: Tracker) -> None:
        """Hand model and tasks to lm-eval, which asks for answers that are in ``rows`` again and gets them."""
        from lm_eval import evaluate

        from eval.lm_harness.model import SparseDecodeLM

        task, tasks = self.prepared.task, self.prepared.tasks
        with refusals(HarnessError):
            lm = SparseDecodeLM(
                load_model(self.prepared.spec, self.prepared.model),
                self.prepared.method,
                executor=self.config.executor,
                journal=StoreJournal(self.store, rows, tracker),
                **({} if task.max_length is None else {"max_length": task.max_length}),
            )
            reset_fewshot(tasks, task)
            self.harness = evaluate(
                lm,
                tasks.loaded,
                limit=task.limit,
                system_instruction=task.system_instruction,
                apply_chat_template=task.apply_chat_template,
                fewshot_as_multiturn=task.multiturn,
                confirm_run_unsafe_code=task.confirm_run_unsafe_code,
            )
        self.broken_scores = lm.not_finite
        score_rows(rows, self.harness)

    def summarize(self, rows: Rows) -> dict[str, Any]:
        """Every block of ``summary.json``."""
        summary = summarise.summary(self.prepared, self._ordered(rows), self.harness, self.store.folder)
        if self.broken_scores and summary["problem"] is None:
            summary["problem"] = f"{self.broken_scores} loglikelihoods are not finite"
        return summary

    def write_results(self, rows: Rows, summary: dict[str, Any]) -> None:
        """Answers with the scores that lm-eval gave at its end, its own results, and keep ratios by layer."""
        assert self.harness is not None
        ordered = self._ordered(rows)
        if ordered:
            self.store.write_text("samples.jsonl", json_lines(ordered))
        documents = loglikelihood_rows(self.harness, self.prepared.tasks)
        if documents:
            self.store.write_text("loglikelihood.jsonl", json_lines(documents))
        self.store.write_json("lm_eval.json", without_samples(self.harness))
        self.tables = {"layers": layer_table(ordered)}
        self.store.write_json("layers.json", self.tables["layers"])

    def show(self, summary: dict[str, Any]) -> None:
        """Print the table."""
        print_summary(summary)

    def _ordered(self, rows: Rows) -> list[dict[str, Any]]:
        return in_order(rows, self.prepared.tasks.names)
