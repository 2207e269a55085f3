"""The accuracy runner: every sample through the engine, scored, counted and kept as it finishes."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

from eval.models import LoadedModel, ModelError, load_model
from eval.records import Sample
from experiments import summary as summarise
from experiments.accuracy_summary import build_summary
from experiments.config import RunConfig
from experiments.environment import describe as describe_environment
from experiments.environment import device_class, versions
from experiments.errors import INVALID_EXIT, RunFailedError, UsageError, one_line
from experiments.estimate import estimate
from experiments.fidelity_log import FidelityLog, page_unit
from experiments.identity import code_fingerprint, digest, run_id
from experiments.prepare import Prepared, prepare, prompts_fingerprint
from experiments.progress import RunProgress, console
from experiments.sample_run import run_sample
from experiments.shards import Shard, absorb_shards, fidelity_elsewhere, merged_fidelity, open_store
from experiments.store import RunStore, read_json
from experiments.table import print_summary
from experiments.tracker import Tracker, make_tracker

_GPU_PREFILL_CHUNK = 32768


def run_accuracy(config: RunConfig) -> int:
    """Run, resume or just show one accuracy run; returns the exit code."""
    prepared = prepare(config)
    identity = identify(prepared)
    store = open_store(config.root, run_id(identity), Shard.parse(config.shard))
    try:
        return AccuracyRun(prepared, identity, store).run()
    finally:
        store.discard_if_empty()
        store.close()


def identify(prepared: Prepared) -> dict[str, Any]:
    """Everything that decides the results of a run (docs/architecture.md, "Identity")."""
    from eval.suites import scoring_module
    from ffd.methods import method_class

    config = prepared.config
    return {
        **config.resolved(),
        "task": prepared.task,
        "model_revision": prepared.model.revision,
        "prompts": digest(prompts_fingerprint(prepared.samples)),
        "executor": prepared.executor,
        "device": device_class(),
        "versions": versions(("torch", "triton", "transformers")),
        "code": code_fingerprint(
            [
                "ffd.engine",
                method_class(config.method["name"]).__module__,
                "eval.fidelity",
                scoring_module(prepared.task["name"]),
            ]
        ),
    }


class AccuracyRun:
    """One run on its way from prompts to a summary."""

    def __init__(self, prepared: Prepared, identity: dict[str, Any], store: RunStore) -> None:
        self.prepared = prepared
        self.config = prepared.config
        self.identity = identity
        self.store = store
        self.unit = page_unit(self.config.method)
        # What the engine was, known again where a resumed run has no sample left to run.
        engine = None if self.config.rerun else read_json(store.folder / "engine.json")
        self.static: dict[str, Any] = engine or {"executor": prepared.executor, "graph": False, "dense_layers": None}

    @property
    def samples(self) -> Sequence[Sample]:
        """Samples that this process runs: all, or its shard's."""
        shard = Shard.parse(self.config.shard)
        return self.prepared.samples if shard is None else shard.own(self.prepared.samples)

    @property
    def _method(self) -> Any:
        from ffd.methods import create

        knobs = dict(self.config.method)
        return create(knobs.pop("name"), knobs)

    @property
    def _all_dense(self) -> bool:
        layers = self.prepared.model.config.get_text_config(decoder=True).num_hidden_layers
        return bool(self._method.dense_layers >= layers)

    def run(self) -> int:
        """Carry the run as far as it goes; returns the exit code."""
        stored = None if self.config.rerun else self.store.summary()
        if stored is not None and stored["status"] == "complete":
            console.print(f"run {self.store.run_id} is finished; rerun=true repeats it")
            print_summary(stored)
            return 0
        if self.config.rerun and not self.config.dry_run:
            self.store.set_aside()
        if self.config.shard is None and not self.config.dry_run:
            self._absorb()
        rows = self.store.finished_samples()
        pending = [s for s in self.samples if (s.task, s.index) not in rows]
        for note in self.prepared.notes:
            console.print(note)
        console.print(estimate(self.prepared, pending).line() + (f", {len(rows)} already done" if rows else ""))
        if self.config.dry_run:
            console.print(f"dry run: nothing was run; results would go to {self.store.folder}")
            return 0
        return self._execute(pending, rows)

    def _execute(self, pending: list[Sample], rows: dict[tuple[str, int], dict[str, Any]]) -> int:
        import yaml

        try:
            self.store.reserve()
            self.store.write_text("config.yaml", yaml.safe_dump(self.identity, sort_keys=False, allow_unicode=True))
            self.store.write_json("environment.json", describe_environment())
            self._summarize(rows, "partial", "not finished: running, or killed")
        except OSError as error:
            raise UsageError(f"out={self.config.root}: cannot be written ({error.strerror})") from None
        tracker = make_tracker(self.config.tracker, self.store.run_id, self.identity, self.config.root)
        try:
            if pending:
                fidelity = FidelityLog(self.store.work / "fidelity", self.unit, fidelity_elsewhere(self.store))
                self._run_samples(pending, rows, fidelity, tracker)
        except UsageError:
            raise
        except KeyboardInterrupt:
            summary = self._summarize(rows, "partial", "interrupted; the same command resumes")
            tracker.finish(summary, {})
            raise
        except Exception as error:
            self._record_failure(rows, error, tracker)
            raise RunFailedError(f"run {self.store.run_id}: {one_line(error)}; finished samples are kept") from error
        with self.store.publishing():
            return self._finish(tracker)

    def _finish(self, tracker: Tracker) -> int:
        if len(self.store.finished_samples()) == len(self.prepared.samples) and self.store.published() is None:
            self._absorb()
        rows = self.store.finished_samples()
        summary = self._summarize(rows, *self._outcome(rows))
        self.store.release_reserve()
        layers = summarise.layer_table(list(rows.values()))
        self.store.write_json("layers.json", layers)
        fidelity = merged_fidelity(self.store.folder, self.unit)
        tracker.finish(summary, {"layers": layers, "fidelity_layers": fidelity.table()})
        fidelity.write_table(self.store.folder / "fidelity.csv")
        print_summary(summary)
        console.print(f"results: {self.store.folder}")
        return INVALID_EXIT if summary["status"] == "invalid" else 0

    def _absorb(self) -> None:
        absorb_shards(self.store.folder, [(s.task, s.index) for s in self.prepared.samples], self.unit)

    def _outcome(self, rows: dict[tuple[str, int], dict[str, Any]]) -> tuple[str, str | None]:
        _, problem = summarise.validity(list(rows.values()), self.prepared.plan, self.static)
        if problem is not None:
            return "invalid", problem
        remaining = len(self.prepared.samples) - len(rows)
        if remaining:
            return "partial", f"{remaining} of {len(self.prepared.samples)} samples are left to other shards"
        missing = [s.task for s in self.prepared.plan.skipped if s.source_missing]
        if missing:
            return "partial", f"no data for {', '.join(missing)}"
        return "complete", None

    def _run_samples(
        self,
        pending: Sequence[Sample],
        rows: dict[tuple[str, int], dict[str, Any]],
        fidelity: FidelityLog,
        tracker: Tracker,
    ) -> None:
        loaded = self._load()
        engine = self._engine(loaded, fidelity)
        self.static.update(
            executor=engine.cache.executor,
            graph=engine.eager_reason is None,
            eager_reason=engine.eager_reason,
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

    def _load(self) -> LoadedModel:
        try:
            return load_model(self.prepared.spec)
        except ModelError as error:
            raise UsageError(str(error)) from None

    def _engine(self, loaded: LoadedModel, fidelity: FidelityLog) -> Any:
        from ffd.cache import UnsupportedModelError
        from ffd.engine import Engine
        from ffd.methods import KnobError

        capacity = max(self.prepared.prompt_tokens(s) + s.max_new_tokens for s in self.prepared.samples)
        chunk = self.config.prefill_chunk
        if chunk is None and loaded.device.startswith("cuda"):
            chunk = _GPU_PREFILL_CHUNK
        try:
            # Where every layer is dense by configuration, exact keys would be kept for nothing.
            probing = self.config.fidelity_every > 0 and not self._all_dense
            return Engine(
                loaded.model,
                self._method,
                capacity=capacity,
                executor=self.config.executor,
                graph=self.config.graph,
                prefill_chunk=chunk,
                probe=fidelity.probe if probing else None,
                probe_every=self.config.fidelity_every or 1,
            )
        except (UnsupportedModelError, KnobError) as error:
            raise UsageError(str(error)) from None

    def _run_sample(self, engine: Any, loaded: LoadedModel, sample: Sample, fidelity: FidelityLog) -> dict[str, Any]:
        fidelity.start()
        return run_sample(engine, loaded, self.prepared.suite, sample)

    def _record_failure(self, rows: Any, error: Exception, tracker: Tracker) -> None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full:
            self.store.release_reserve()
        reason = f"{type(error).__name__}: {one_line(error)}"
        try:
            summary = self._summarize(rows, "failed", reason)
        except OSError:
            console.print("the failure itself could not be recorded: the disk is full")
            return
        tracker.finish(summary, {})

    def _summarize(
        self, rows: dict[tuple[str, int], dict[str, Any]], status: str, reason: str | None
    ) -> dict[str, Any]:
        with self.store.publishing():
            return self.store.published() or self._write_summary(rows, status, reason)

    def _write_summary(
        self, rows: dict[tuple[str, int], dict[str, Any]], status: str, reason: str | None
    ) -> dict[str, Any]:
        fidelity = merged_fidelity(self.store.folder, self.unit).summary()
        built = build_summary(
            self.prepared, self._method, list(rows.values()), self.static, fidelity, all_dense=self._all_dense
        )
        summary = {"run_id": self.store.run_id, "status": status, "reason": reason, **built}
        self.store.write_json("summary.json", summary)
        return summary
