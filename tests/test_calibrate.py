"""Calibration and matched comparison: curves, their inversion, and both runners on a tiny random model."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml

from eval.fidelity import pair_means
from eval.fidelity.curves import Curves, enough_for_all, invert, margin_curves
from eval.fidelity.replay import replay, replay_with_ledger
from eval.fidelity.traces import Trace, TraceRecorder
from experiments.errors import UsageError
from experiments.match import Found, _remembered, replay_cost, search
from ffd import FFD, Dense, Engine
from ffd.ffd_layer import FFDLayer
from ffd.methods import SearchKnob, create
from tests.fidelity_runs import SMALL_FFD, common, summary_of, the_run, tiny_folder
from tests.run_in_process import invoke
from tests.tiny import random_prompt, tiny_model

__all__ = ["tiny_folder"]

METHOD = FFD(block_size=64, sub_block=16, n_sink=4, n_local=16)
MARGINS = (0.0, 0.5, 1.0, 2.0, 4.0, 64.0)


@pytest.fixture(scope="module")
def trace() -> Trace:
    recorder = TraceRecorder([0, 1])
    engine = Engine(
        tiny_model("llama", heads=6, kv_heads=2), Dense(), capacity=200, batch_size=2, probe=recorder, probe_every=3
    )
    engine.generate([random_prompt(150, 1), random_prompt(122, 2)], 12)
    return recorder.take()


@pytest.fixture(scope="module")
def curves(trace: Trace) -> Curves:
    return margin_curves([trace], METHOD, MARGINS)


@pytest.mark.parametrize("index", range(len(MARGINS)))
def test_a_point_of_the_curves_is_a_replay_at_that_margin(trace: Trace, curves: Curves, index: int) -> None:
    state, reports = replay_with_ledger(trace, replace(METHOD, delta=MARGINS[index]))
    for name, curve in (
        ("mass_recall", curves.recall),
        ("mass_recall_selected", curves.recall_own),
        ("lse_error", curves.lse),
    ):
        torch.testing.assert_close(curve[index], pair_means(state, name))
    for layer, report in enumerate(reports):
        assert float(curves.bytes_read[index, layer].sum()) == sum(report.bytes_read.values())
        assert float(curves.dense_bytes[layer].sum()) == report.dense_bytes


def test_scores_are_computed_once_for_all_margins(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    scores = FFDLayer._scores

    def counted(self: FFDLayer, *args: Any) -> Any:
        scored.append(self.geometry.layer)
        return scores(self, *args)

    monkeypatch.setattr(FFDLayer, "_scores", counted)
    margin_curves([trace], METHOD, MARGINS)
    assert len(scored) == len(trace.layers) * len(trace.lengths)


def test_margins_that_do_not_fit_together_give_the_same_curves(
    trace: Trace, curves: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.fidelity.curves.BYTES_AT_ONCE", 1)
    apart = margin_curves([trace], METHOD, MARGINS)
    for name in ("recall", "recall_own", "lse", "lse_own", "bytes_read", "dense_bytes"):
        torch.testing.assert_close(getattr(apart, name), getattr(curves, name), rtol=0, atol=1e-12)


def test_recall_and_bytes_never_fall_with_the_margin(curves: Curves) -> None:
    for curve in (curves.recall, curves.recall_own, curves.bytes_read):
        assert (curve.diff(dim=0) >= -1e-12).all()
    assert curves.recall_own[-1].min() == pytest.approx(1.0)


def test_margins_per_head_meet_the_target_whatever_the_group_loads(trace: Trace, curves: Curves) -> None:
    found = invert(curves, "mass_recall", 0.9, "head")
    assert found.unique().numel() > 1
    state = replay(trace, replace(METHOD, deltas=tuple(map(tuple, found.tolist()))))
    assert (pair_means(state, "mass_recall_selected") >= 0.9).all()
    # Minimal: the next smaller margin would not do.
    for layer, head in ((0, 0), (1, 5)):
        position = MARGINS.index(float(found[layer, head]))
        assert position == 0 or curves.recall_own[position - 1, layer, head] < 0.9


def test_layer_and_global_margins_meet_the_mean(trace: Trace, curves: Curves) -> None:
    for per in ("layer", "global"):
        found = invert(curves, "mass_recall", 0.9, per)
        assert (found == found[:, :1]).all()
        state = replay(trace, replace(METHOD, deltas=tuple(map(tuple, found.tolist()))))
        means = pair_means(state, "mass_recall")
        assert (means.mean(dim=1) >= 0.9).all() if per == "layer" else means.mean() >= 0.9
    assert invert(curves, "mass_recall", 0.9, "global").unique().numel() == 1


def test_a_ceiling_of_bytes_is_the_largest_margin_below_it(trace: Trace, curves: Curves) -> None:
    ceiling = float(curves.bytes_ratio[1].max())  # within reach of every kv head
    for per in ("global", "layer", "head"):
        found = invert(curves, "bytes_ratio", ceiling, per)
        _, reports = replay_with_ledger(trace, replace(METHOD, deltas=tuple(map(tuple, found.tolist()))))
        ratio = sum(sum(r.bytes_read.values()) for r in reports) / sum(r.dense_bytes for r in reports)
        assert ratio <= ceiling + 1e-9
        assert 0.5 <= float(found.min()) <= float(found.max()) < 64.0
        # Heads that share a kv head share what it reads.
        assert per != "head" or torch.equal(found[:, :3], found[:, :1].expand(-1, 3))


def test_lse_and_targets_out_of_reach(curves: Curves) -> None:
    found = invert(curves, "lse_error", 0.05, "head")
    chosen = torch.tensor([[MARGINS.index(x) for x in row] for row in found.tolist()])
    assert (curves.lse_own.gather(0, chosen[None])[0] <= 0.05).all()
    assert (invert(curves, "lse_error", 1e-12, "global") == 64.0).all()
    assert (invert(curves, "bytes_ratio", 1e-6, "layer") == 0.0).all()


def test_one_margin_is_enough_where_every_head_alone_meets_the_target(trace: Trace, curves: Curves) -> None:
    worst = []
    for margin in MARGINS:
        state, _ = replay_with_ledger(trace, replace(METHOD, delta=margin))
        worst.append(float(pair_means(state, "mass_recall_selected").min()))
    enough = next(margin for margin, recall in zip(MARGINS, worst, strict=True) if recall >= 0.9)
    assert enough_for_all(curves, "mass_recall", 0.9) == enough
    # The mean over heads asks for less.
    assert enough > float(invert(curves, "mass_recall", 0.9, "global").max())
    # Of kv heads' bytes it is a ceiling: the largest margin below it.
    ceiling = float(curves.bytes_ratio[1].max())
    position = MARGINS.index(enough_for_all(curves, "bytes_ratio", ceiling) or math.nan)
    assert float(curves.bytes_ratio[position].max()) <= ceiling < float(curves.bytes_ratio[position + 1].max())
    assert enough_for_all(curves, "lse_error", 1e-12) is None
    assert enough_for_all(curves, "bytes_ratio", 1e-6) is None


def test_methods_without_a_margin_per_head_have_no_curves(trace: Trace) -> None:
    with pytest.raises(ValueError, match="QuestLayer: has no margin per head"):
        margin_curves([trace], create("quest"), MARGINS)


def test_the_runner_writes_what_ffd_accepts(tiny_folder: Any, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    arguments = ["runner=calibrate", "calibrate.value=0.9", *SMALL_FFD, *common(tiny_folder, tmp_path, samples=4)]
    assert invoke(arguments, monkeypatch) == 0
    folder = the_run(tmp_path)
    summary = summary_of(folder)
    assert summary["prompts"] == {"calibration": 3, "held_out": 1, "seed": 43}
    assert summary["calibrated"]["pairs"]["min"] >= 0.9
    assert summary["held_out"]["reached"] >= 0.9 - 0.02  # prompts of one task look alike
    out = capsys.readouterr().out
    (line,) = (x for x in out.splitlines() if "held out" in x and "per head" in x)
    row = summary["held_out"]
    shown = (row["reached"], row["pairs_meeting"], row["pairs"]["min"], row["keep_head"], row["keep_io"])
    assert [cell.strip() for cell in line.split("│")[3:8]] == [f"{value:.4f}" for value in shown]
    written = yaml.safe_load((folder / "method.yaml").read_text())
    assert [len(row) for row in written["deltas"]] == [4, 4]
    # What it says to run runs, knobs and all: other prompts, the margins in place, the recall that was asked for.
    said = re.search(r"run with: python run.py (.*?method\.deltas=\S*method\.yaml)", "".join(out.split("\n")))
    assert said is not None
    again = ["runner=fidelity", *said[1].split()]
    assert invoke([*again, *common(tiny_folder, tmp_path, samples=4)], monkeypatch) == 0
    runs = [f for f in (tmp_path / "runs").iterdir() if summary_of(f)["runner"] == "fidelity"]
    run = summary_of(runs[0])
    assert run["method"]["deltas"] == written["deltas"]
    assert run["metrics"]["mass_recall_selected"]["macro"] >= 0.9 - 0.02
    identities = [yaml.safe_load((f / "config.yaml").read_text()) for f in (folder, runs[0])]
    assert [identity["seed"] for identity in identities] == [42, 42]
    assert identities[0]["prompts"] != identities[1]["prompts"]
    changed = ["runner=fidelity", f"method.deltas={folder / 'method.yaml'}", *SMALL_FFD, "method.centre=true"]
    assert invoke([*changed, *common(tiny_folder, tmp_path)], monkeypatch) == 2
    assert "method.centre=True: expected False, with which method.deltas=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method=quest"], "method=quest: has no margins per head to calibrate"),
        (["calibrate.target=speed"], "calibrate.target=speed: expected one of mass_recall, lse_error, bytes_ratio"),
        (["calibrate.value=1.5"], "calibrate.value=1.5: expected a number in (0, 1]"),
        (["calibrate.holdout=1"], "calibrate.holdout=1: expected a share in [0, 1)"),
        (["method.deltas=/nowhere"], "method.deltas=/nowhere: cannot be read"),
        (["method.deltas=''"], "method.deltas=: expected the method.yaml"),
    ],
)
def test_bad_requests_give_one_line(
    arguments: list[str], message: str, tiny_folder: Any, tmp_path: Any, monkeypatch: Any, capsys: Any
) -> None:
    assert invoke(["runner=calibrate", *common(tiny_folder, tmp_path), *arguments], monkeypatch) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_calibration_without_prompts_to_check_on_comes_to_its_end(
    tiny_folder: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    """Once it fitted all margins, then failed for want of a held-out figure to log."""
    arguments = ["runner=calibrate", *SMALL_FFD, *common(tiny_folder, tmp_path), "calibrate.holdout=0"]
    assert invoke(arguments, monkeypatch) == 0
    summary = summary_of(the_run(tmp_path))
    assert summary["status"] == "complete"
    assert summary["held_out"] is None


def test_the_search_finds_the_nearest_value() -> None:
    tried: list[float] = []

    def cost(value: float) -> float:
        tried.append(value)
        return value / 1000

    found = search(cost, SearchKnob("token_budget", 1, math.inf), 0.3, 1000)
    assert found.cost == found.value / 1000 == pytest.approx(0.3, abs=0.005)
    assert (found.lowest, found.highest) == (0.001, 1.0)
    assert len(tried) <= 12
    assert all(isinstance(x, int) for x in tried)
    found = search(lambda x: 0.25 + x / 64, SearchKnob("delta", 0.0, 32.0), 0.5, 1000)
    assert found.cost == pytest.approx(0.5, abs=0.005)
    assert found.value == pytest.approx(16.0, abs=0.4)
    assert search(lambda x: 0.6, SearchKnob("delta", 0.0, 32.0), 0.1, 1000) == Found(0.0, 0.6, 0.6, 0.6)


def test_costs_count_skipped_layers_as_dense(trace: Trace) -> None:
    alone = replay_cost([trace], create("quest", {"token_budget": 64, "skip_layers": 0}), "keep_io", 2, "auto")
    half = replay_cost([trace], create("quest", {"token_budget": 64, "skip_layers": 1}), "keep_io", 2, "auto")
    assert alone < half < 1
    assert replay_cost([trace], create("quest", {"token_budget": 64, "skip_layers": 2}), "keep_io", 2, "auto") == 1
    state, reports = replay_with_ledger(trace, METHOD)
    ratio = sum(sum(r.bytes_read.values()) for r in reports) / sum(r.dense_bytes for r in reports)
    assert replay_cost([trace], METHOD, "bytes_ratio", 2, "auto") == pytest.approx(ratio)
    assert replay_cost([trace], METHOD, "keep_io", 2, "auto") == pytest.approx(
        sum(sum(r.union) for r in reports) / sum(2 * r.context for r in reports)
    )
    assert state.layers == (0, 1)


def test_an_answer_weighs_by_its_decode_steps(trace: Trace) -> None:
    """A short answer's one recorded step stood for as much as one of 16 of a long answer's, and 27 % became 32."""

    def row(index: int, decode_steps: int | None) -> Trace:
        part = {
            name: {layer: tensor[index : index + 1] for layer, tensor in getattr(trace, name).items()}
            for name in ("keys", "values")
        }
        queries = {layer: tensor[:, index : index + 1] for layer, tensor in trace.queries.items()}
        rows = {name: getattr(trace, name)[:, index : index + 1] for name in ("lengths", "active")}
        return replace(
            trace, **part, **rows, queries=queries, prompt_lengths=trace.prompt_lengths[index : index + 1],
            decode_steps=decode_steps,
        )  # fmt: skip

    method = create("topk", {"token_budget": 32})
    first, second = (replay_cost([row(index, None)], method, "keep_io", 2, "auto") for index in (0, 1))
    assert abs(first - second) > 0.01
    steps = len(trace.lengths)
    equal = replay_cost([row(0, None), row(1, None)], method, "keep_io", 2, "auto")
    assert replay_cost([row(0, steps), row(1, steps)], method, "keep_io", 2, "auto") == pytest.approx(equal)
    nearly = replay_cost([row(0, 1000 * steps), row(1, steps)], method, "keep_io", 2, "auto")
    assert nearly == pytest.approx(first, abs=2e-3)
    assert equal != pytest.approx(first, abs=5e-3)


def test_methods_are_matched_at_a_measured_cost(tiny_folder: Any, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    """Two methods with different knobs end at the same share of tokens loaded, on prompts of another seed."""
    for method in (["method=topk"], ["method=ffd", *SMALL_FFD]):
        arguments = ["match.keep_io=0.6", "match.samples=2", *method, *common(tiny_folder, tmp_path)]
        assert invoke(arguments, monkeypatch) == 0
    runs = [summary_of(f) for f in (tmp_path / "runs").iterdir()]
    assert {s["method"]["name"] for s in runs} == {"topk", "ffd"}
    for run in runs:
        assert run["sparsity"]["keep_io"] == pytest.approx(0.6, abs=0.12)
    assert "calibration prompts" in capsys.readouterr().err
    assert invoke(["match.keep_io=0.6", "method=dense", *common(tiny_folder, tmp_path)], monkeypatch) == 0
    assert "method dense reads everything and is left as it is" in capsys.readouterr().err


def test_a_match_belongs_to_its_precision(tiny_folder: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """Once a match in bfloat16 took what had been recorded, and found, in float32."""
    for dtype in ("float32", "bfloat16"):
        arguments = ["match.keep_io=0.6", "match.samples=1", f"model.dtype={dtype}", "method=topk"]
        assert invoke([*arguments, *common(tiny_folder, tmp_path)], monkeypatch) == 0
    (first, second) = sorted((tmp_path / "match" / "traces").iterdir())
    dtypes = {Trace.load(next(f.glob("*.safetensors"))).queries[0].dtype for f in (first, second)}
    assert dtypes == {torch.float32, torch.bfloat16}
    assert len(list((tmp_path / "match").glob("topk-*.json"))) == 2


def test_a_target_out_of_reach_is_an_error_and_remembered(
    tiny_folder: Any, tmp_path: Any, monkeypatch: Any, capsys: Any
) -> None:
    arguments = ["match.keep_io=0.01", "match.samples=1", "method=ffd", *SMALL_FFD, *common(tiny_folder, tmp_path)]
    for _ in range(2):
        assert invoke(arguments, monkeypatch) == 2
        (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
        assert line.startswith("error: match.keep_io=0.01: method ffd cannot meet it on")
        assert line.endswith("a longer task.length may, or a smaller method.block_size")
        assert "delta spans 0." in line
        monkeypatch.setattr("experiments.match.record_traces", None)  # the second time nothing is searched
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_searches_nothing(tiny_folder: Any, tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("experiments.match.record_traces", None)
    arguments = ["match.keep_io=0.5", "method=topk", "dry_run=true", *common(tiny_folder, tmp_path)]
    assert invoke(arguments, monkeypatch) == 0
    assert "token_budget is searched for when it runs" in capsys.readouterr().err


def test_what_runs_no_method_on_samples_cannot_be_matched(
    tiny_folder: Any, tmp_path: Any, monkeypatch: Any, capsys: Any
) -> None:
    for runner in ("prompts", "calibrate"):
        arguments = [f"runner={runner}", "match.keep_io=0.5", *common(tiny_folder, tmp_path)]
        assert invoke(arguments, monkeypatch) == 2
        assert f"error: match.keep_io=0.5: expected null with runner={runner}" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", "[]", '{"value": "x", "cost": 0.2, "lowest": 0.1, "highest": 1}'])
def test_a_damaged_memory_of_a_search_is_named(content: str, tmp_path: Any) -> None:
    path = tmp_path / "ffd-1.json"
    assert _remembered(path) is None
    path.write_text(content)  # was a KeyError
    with pytest.raises(UsageError, match=r"ffd-1\.json: expected the result of a search with value, cost"):
        _remembered(path)
