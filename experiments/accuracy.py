"""The accuracy runner: every sample through the engine, scored, counted and kept as it finishes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.answer import run_sample
from eval.fidelity import broken_output
from eval.models import LoadedModel, load_model
from eval.records import Sample
from experiments import summary as summarise
from experiments.accuracy_summary import build_summary
from experiments.config import RunConfig
from experiments.engines import make_method, prefill_chunk
from experiments.estimate import estimate
from experiments.fidelity_log import FidelityLog, page_unit
from experiments.files import read_json
from experiments.identity import digest, run_id
from experiments.lifecycle import Rows, StudyRun, code_and_machine
from experiments.predictions import write_predictions
from experiments.prepare import Prepared, prepare, prompts_fingerprint
from experiments.progress import RunProgress
from experiments.shards import Shard, fidelity_elsewhere, merge_shards, merged_fidelity, open_store
from experiments.store import RunStore
from experiments.table import print_summary
from experiments.tracker import Tracker


def run_accuracy(config: RunConfig) -> int:
    """Run, resume or just show one accuracy run; returns the exit code."""
    prepared = prepare(config)
    identity = identify(prepared)
    store = open_store(config.root, run_id(identity), Shard.parse(config.shard))
    return AccuracyRun(prepared, identity, store).run()


def identify(prepared: Prepared) -> dict[str, Any]:
    """Everything that decides the results of a run (docs/architecture.md, "Identity")."""
    from eval.suites import scoring_module
    from ffd.methods import method_class

    config = prepared.config
    method = method_class(config.method["name"]).__module__
    return {
        **config.resolved(),
        "task": prepared.task,
        "model_revision": prepared.model.revision,
        "prompts": digest(prompts_fingerprint(prepared.samples)),
        "executor": prepared.executor,
        **code_and_machine(["ffd.engine", method, "eval.fidelity", scoring_module(prepared.task["name"])]),
    }


class AccuracyRun(StudyRun):
    """One run on its way from prompts to a summary."""

    def __init__(self, prepared: Prepared, identity: dict[str, Any], store: RunStore) -> None:
        super().__init__(prepared.config, identity, store)
        self.prepared = prepared
        self.method = make_method(self.config.method)
        self.shard = Shard.parse(self.config.shard)
        self.unit = page_unit(self.config.method)
        # What the engine was, known again where a resumed run has no sample left to run.
        engine = None if self.config.rerun else read_json(store.folder / "engine.json")
        self.static: dict[str, Any] = engine or {"executor": prepared.executor, "graph": False, "dense_layers": None}

    @property
    def samples(self) -> Sequence[Sample]:
        """Samples that this process runs: all, or its shard's."""
        return self.prepared.samples if self.shard is None else self.shard.own(self.prepared.samples)

    @property
    def _all_dense(self) -> bool:
        layers = self.prepared.model.config.get_text_config(decoder=True).num_hidden_layers
        return bool(self.method.dense_layers >= layers)

    def _pending(self, rows: Rows) -> list[Sample]:
        return [s for s in self.samples if (s.task, s.index) not in rows]

    def finished(self) -> Rows:
        """Samples that are done, those of earlier shards merged in where this run is undivided."""
        rows = super().finished()
        return rows if self.shard is not None or self.config.dry_run else self._merged(rows)

    def settled(self, rows: Rows) -> Rows:
        """All samples of the run; whoever finds them all finished merges the shards."""
        rows = self.store.latest(rows)
        whole = len(rows) == len(self.prepared.samples) and self.store.published() is None
        return self._merged(rows) if whole else rows

    def _merged(self, rows: Rows) -> Rows:
        return merge_shards(self.store.folder, rows, [(s.task, s.index) for s in self.prepared.samples], self.unit)

    def plan(self, done: Rows) -> str:
        """The prompts' notes, then samples, tokens and time."""
        line = estimate(self.prepared, self._pending(done)).line() + (f", {len(done)} already done" if done else "")
        return "\n".join([*self.prepared.notes, line])

    def work(self, rows: Rows, tracker: Tracker) -> None:
        """Run what is pending, sample by sample."""
        pending = self._pending(rows)
        if not pending:
            return
        fidelity = FidelityLog(self.store.work / "fidelity", self.unit, fidelity_elsewhere(self.store))
        loaded = load_model(self.prepared.spec, self.prepared.model)
        engine = self._engine(loaded, fidelity)
        self.static.update(
            executor=engine.cache.executor,
            graph=engine.eager_reason is None,
            eager_reason=engine.eager_reason,
            fused=list(engine.fused),
            dense_layers=len(engine.cache.layers) - len(engine.cache.method_layers),
            sliding_layers=engine.cache.sliding_layers,
        )
        self.store.write_json("engine.json", self.static)
        with RunProgress(len(self.samples), len(self.samples) - len(pending)) as progress:
            for sample in pending:
                progress.sample(sample.task, sample.index)
                row = self._run_sample(engine, loaded, sample, fidelity)
                # Fidelity first: a kill between the two repeats the sample, and its state is not counted twice.
                fidelity.keep(sample.task, sample.index)
                self.store.append_sample(row)
                rows[sample.task, sample.index] = row
                timing = row["timing"]
                rate = timing["timed_tokens"] / timing["decode_s"] if timing["timed_tokens"] else None
                progress.finished(sample.task, sample.index, row["score"], row["seconds"], rate)
                tracker.log({f"score/{sample.task}": row["score"], "decode_tok_s": rate, "seconds": row["seconds"]})

    def _engine(self, loaded: LoadedModel, fidelity: FidelityLog) -> Any:
        from ffd.engine import Engine

        capacity = max(self.prepared.prompt_tokens(s) + s.max_new_tokens for s in self.prepared.samples)
        # Where every layer is dense by configuration, exact keys would be kept for nothing.
        probing = self.config.fidelity_every > 0 and not self._all_dense
        return Engine(
            loaded.model,
            self.method,
            capacity=capacity,
            executor=self.config.executor,
            graph=self.config.graph,
            fuse=self.config.fuse,
            prefill_chunk=prefill_chunk(self.config.prefill_chunk, loaded.device),
            probe=fidelity.probe if probing else None,
            probe_every=self.config.fidelity_every or 1,
        )

    def _run_sample(self, engine: Any, loaded: LoadedModel, sample: Sample, fidelity: FidelityLog) -> dict[str, Any]:
        fidelity.start()
        return run_sample(engine, loaded, self.prepared.suite, sample)

    def summarize(self, rows: Rows) -> dict[str, Any]:
        """Every block of ``summary.json``, and what keeps the run from being complete."""
        log = merged_fidelity(self.store.folder, self.unit)
        own, all_dense = list(rows.values()), self._all_dense
        summary = build_summary(self.prepared, self.method, own, self.static, log.summary(), all_dense=all_dense)
        problem = summary["problem"] or broken_output(log.state)
        remaining = len(self.prepared.samples) - len(rows)
        missing = [s.task for s in self.prepared.plan.skipped if s.source_missing]
        lacking = f"no data for {', '.join(missing)}" if missing else None
        if remaining:  # an invalid run is a finished one, to which other shards would add nothing
            left = f"{remaining} of {len(self.prepared.samples)} samples are left to other shards"
            lacking, problem = left + (f"; {problem}" if problem else ""), None
        return {**summary, "problem": problem, "lacking": lacking}

    def write_results(self, rows: Rows, summary: dict[str, Any]) -> None:
        """Keep ratios and fidelity by layer and head, and the benchmark's own prediction files."""
        write_predictions(self.store.folder / "predictions", self.prepared.suite, self.prepared.samples, rows)
        layers = summarise.layer_table(list(rows.values()))
        self.store.write_json("layers.json", layers)
        fidelity = merged_fidelity(self.store.folder, self.unit)
        fidelity.write_table(self.store.folder / "fidelity.csv")
        self.tables = {"layers": layers, "fidelity_layers": fidelity.table()}

    def show(self, summary: dict[str, Any]) -> None:
        """Print the table."""
        print_summary(summary)
