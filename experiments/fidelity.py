"""The fidelity runner: a method beside dense attention on the dense trajectory, and its own predictions beside dense's.

Every prompt is followed by two engines, step by step, along the tokens that dense attention chooses (or the
text's own): one with dense outputs, the method probed beside them, and one with the method's own outputs. The
first chooses the tokens and gives fidelity and ledger, the two together perplexity and KL divergence. Where they
can be, both are rows of one forward of the model.
"""

from __future__ import annotations

import time
from functools import reduce
from typing import Any

from eval.fidelity import aggregate, broken_metric, histogram, table, write_table
from eval.fidelity.forced import ForcedScores, compare_forced
from eval.fidelity.traces import TraceRecorder
from experiments import figures
from experiments import summary as summarise
from experiments.config import RunConfig
from experiments.engines import make_method
from experiments.errors import UsageError
from experiments.fidelity_log import FidelityLog, page_unit
from experiments.fidelity_table import print_fidelity
from experiments.laws import laws_of_a_run, problem
from experiments.lifecycle import Rows, StudyRun, code_and_machine
from experiments.progress import console
from experiments.table import number
from experiments.tracker import Tracker
from experiments.trajectory import Probes, continuation_of, make_engine, observer
from experiments.workload import Item, Workload, load_workload
from ffd.methods import method_class
from ffd.pairing import why_not_paired
from ffd.report import read_ledger


def run_fidelity(config: RunConfig) -> int:
    """Run, resume or show one fidelity run; returns the exit code."""
    if config.fidelity.every < 1:
        raise UsageError(f"fidelity.every={config.fidelity.every}: expected an integer >= 1 with runner=fidelity")
    workload = load_workload(config)
    options = config.fidelity
    identity = {
        **config.resolved(),
        "task": workload.task,
        "trace": {"mode": options.trace, "layers": options.layers and list(options.layers), "values": options.values},
        "model_revision": workload.model.revision,
        "prompts": workload.fingerprint,
        "executor": workload.executor,
        **code_and_machine(["ffd.teacher", method_class(config.method["name"]).__module__, "eval.fidelity.forced"]),
    }
    return FidelityRun(config, identity, workload).run()


class FidelityRun(StudyRun):
    """One method on one workload."""

    def __init__(self, config: RunConfig, identity: dict[str, Any], workload: Workload) -> None:
        super().__init__(config, identity)
        self.workload = workload
        self.method = make_method(config.method)
        self.unit = page_unit(config.method)

    def plan(self, done: Rows) -> str:
        """Prompts and tokens."""
        tokens = sum(len(item.prompt) for item in self.workload.items)
        return (
            f"{len(self.workload.items)} prompts, {tokens} tokens, up to {self.workload.items[0].max_new_tokens} "
            f"decode steps each, 1 in {self.config.fidelity.every} probed; {len(done)} done"
        )

    def work(self, rows: Rows, tracker: Tracker) -> None:
        """Follow every pending prompt along the dense trajectory."""
        pending = [item for item in self.workload.items if (item.task, item.index) not in rows]
        if not pending:
            return
        config, workload, loaded = self.config, self.workload, self.workload.load()
        log = FidelityLog(self.store.folder / "fidelity", self.unit)
        own = make_engine(config, workload, loaded, self.method, graph=config.graph)
        recorder = None
        probe: Any = log.probe
        if config.fidelity.trace == "record":
            recorder = TraceRecorder(config.fidelity.layers or None, values=config.fidelity.values)
            probe = Probes(log.probe, recorder)
        beside = observer(config, workload, loaded, self.method, probe, config.fidelity.every)
        separate_steps = why_not_paired(beside, own)
        for item in pending:
            started = time.perf_counter()
            log.start()
            if recorder is not None:
                recorder.start()
            continuation = continuation_of(item, loaded)
            forced = compare_forced(beside, own, [item.prompt], continuation)
            new_tokens = len(continuation.tokens[0])
            steps = new_tokens - 1
            if recorder is not None and steps:
                self._keep_trace(recorder, item, steps)
            log.keep(item.task, item.index)
            row = {
                "task": item.task,
                "index": item.index,
                "prompt_fingerprint": item.fingerprint,
                "prompt_tokens": len(item.prompt),
                "new_tokens": new_tokens,
                "seconds": time.perf_counter() - started,
                "executor": beside.cache.executor,
                "dense_layers": len(beside.cache.layers) - len(beside.cache.method_layers),
                "separate_steps": separate_steps,
                "forced": forced.to_dict(),
                "ledger": read_ledger(beside.cache, steps).totals(),
            }
            self.store.append_sample(row)
            rows[item.task, item.index] = row
            tracker.log({"kl_mean": forced.summary()["kl_mean"], "seconds": row["seconds"]})
            console.print(
                f"[{len(rows)}/{len(workload.items)}] {item.task} {item.index}: {steps} decode steps, "
                f"KL {number(forced.summary()['kl_mean'], 5)}, {row['seconds']:.1f} s"
            )

    def _keep_trace(self, recorder: TraceRecorder, item: Item, decode_steps: int) -> None:
        try:
            trace = recorder.take(f"{self.workload.model.name}, {item.task} {item.index}", decode_steps)
        except ValueError as error:
            raise UsageError(f"fidelity.{error}") from None
        trace.save(self.store.folder / "traces" / f"{item.task}-{item.index}.safetensors")

    def summarize(self, rows: Rows) -> dict[str, Any]:
        """Every block of ``summary.json``."""
        ordered = [rows[i.task, i.index] for i in self.workload.items if (i.task, i.index) in rows]
        sparsity, reasons = summarise.sparsity(ordered, *summarise.attention_heads(self.workload.model.config))
        log = FidelityLog(self.store.folder / "fidelity", self.unit)
        values, fidelity_reasons = log.summary()
        forced = merged(ordered)
        predictions = forced.summary()
        forced_reasons = {f"forced.{k}": reason for k, reason in predictions.pop("null_reasons").items()}
        metrics = aggregate(log.state)
        validity = {key: sum(r["ledger"][key] for r in ordered) for key in _STEPS}
        validity["executor"] = self.workload.executor
        validity["dense_layers"] = ordered[0]["dense_layers"] if ordered else None
        validity["separate_steps"] = ordered[0]["separate_steps"] if ordered else None
        empty = summarise.attended_to_nothing(ordered) or broken_metric(log.state, ["lse_error"])
        laws = laws_of_a_run(self.method, validity, metrics, predictions, empty=empty) if ordered else []
        broken = [law for law in laws if not law.holds]
        return {
            "problem": problem(laws),
            "trajectory": "dense",
            "method": dict(self.config.method),
            "model": {"name": self.workload.model.label, "revision": self.workload.model.revision},
            "task": self.workload.task,
            "sparsity": sparsity,
            "counted": summarise.COUNTED,
            "fidelity": values,
            "metrics": metrics,
            "forced": predictions,
            "laws": [law.as_dict() for law in laws],
            "laws_broken": len(broken),
            "validity": validity,
            "timing": {"total_s": sum(r["seconds"] for r in ordered), "prompts": len(ordered)},
            "notes": list(self.workload.notes),
            "null_reasons": {**reasons, **fidelity_reasons, **forced_reasons},
        }

    def write_results(self, rows: Rows, summary: dict[str, Any]) -> None:
        """Tables by layer and head, by position and by stage, histograms, and figures of them."""
        ordered = [rows[i.task, i.index] for i in self.workload.items]
        folder, state = self.store.folder, FidelityLog(self.store.folder / "fidelity", self.unit).state
        positions = merged(ordered).by_position()
        self.store.write_json("layers.json", summarise.layer_table(ordered))
        write_table(folder / "ledger.csv", summarise.stage_table(ordered))
        write_table(folder / "positions.csv", positions)
        drawn = folder / "figures"
        figures.kl_by_position(drawn, positions)
        sparsity = summary["sparsity"]
        dense = sum(layer["dense_bytes"] for row in ordered for layer in row["ledger"]["layers"])
        figures.bytes_by_stage(drawn, sparsity["bytes_by_stage"], dense)
        if not state.layers:
            return
        by_head = table(state)
        write_table(folder / "fidelity.csv", by_head)
        names = ("lse_error", "lse_omitted", "lse_quantisation", "pseudo_max_gap")
        histograms = {name: histogram(state, name) for name in names}
        self.store.write_json("histograms.json", histograms)
        figures.by_layer(drawn, by_head)
        figures.keep_heat_map(drawn, by_head)
        figures.keep_distribution(drawn, by_head)
        if sum(histograms["pseudo_max_gap"]["counts"]):
            figures.gap_histogram(drawn, {self.config.method["name"]: histograms["pseudo_max_gap"]})

    def show(self, summary: dict[str, Any]) -> None:
        """Print the figures, and the laws that are broken beside them."""
        print_fidelity(summary)


_STEPS = ("sparse_steps", "dense_steps", "expected_steps")


def merged(rows: list[dict[str, Any]]) -> ForcedScores:
    """Teacher-forced predictions of all rows."""
    return reduce(ForcedScores.merge, (ForcedScores.from_dict(r["forced"]) for r in rows), ForcedScores())
