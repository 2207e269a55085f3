"""runner=fidelity and trace=replay end to end on a tiny random model: what they leave, how they resume and agree."""

from __future__ import annotations

import csv
import json

import pytest

from experiments.laws import laws_of_a_run, laws_of_a_sweep
from experiments.store import RunStore
from ffd import FFD, Dense
from ffd.methods import create
from tests.fidelity_runs import SMALL_FFD, common, summary_of, the_run, tiny_folder
from tests.run_in_process import invoke

__all__ = ["tiny_folder"]

LAYERS, HEADS = 2, 4
FIGURES = (
    "spearman_by_layer",
    "keep_heat_map",
    "keep_distribution",
    "pseudo_max_gap",
    "bytes_by_stage",
    "kl_by_position",
)
SWEEP = (
    "+fidelity.sweep={ffd: {delta: [0.5, 2], pseudo_max: [refined, scan], block_size: [64]}, "
    "topk: {token_budget: [8, 64]}}"
)
RULES = {"ffd pseudo_max=refined block_size=64", "ffd pseudo_max=scan block_size=64"}
REPLAY = ["runner=fidelity", "trace=replay", "tracker=none", "~fidelity.sweep"]


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def recorded(tiny_folder, tmp_path_factory):
    """A finished fidelity run with traces."""
    out = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["runner=fidelity", "trace=record", "delta=1", *SMALL_FFD, *common(tiny_folder, out)]
        assert invoke(arguments, patch) == 0
    return the_run(out), arguments


def test_a_run_leaves_tables_histograms_and_figures(recorded):
    folder, _ = recorded
    summary = summary_of(folder)
    assert summary["status"] == "complete"
    assert summary["trajectory"] == "dense"
    assert len(rows_of(folder / "fidelity.csv")) == LAYERS * HEADS
    assert {row["layer"] for row in rows_of(folder / "ledger.csv")} == {"0", "1"}
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    steps = sum(s["new_tokens"] - 1 for s in samples)
    assert summary["validity"]["sparse_steps"] == steps * LAYERS
    assert summary["validity"]["separate_steps"] is None
    assert sum(int(r["tokens"]) for r in rows_of(folder / "positions.csv")) == steps
    assert 0 < summary["fidelity"]["mass_recall"] < 1
    assert summary["forced"]["kl_mean"] > 0
    assert summary["metrics"]["keep_head"]["pairs"]["max"] <= 1
    gaps = json.loads((folder / "histograms.json").read_text())["pseudo_max_gap"]
    assert sum(gaps["counts"]) == summary["metrics"]["pseudo_max_gap"]["observations"]
    for name in FIGURES:
        assert (folder / "figures" / f"{name}.svg").read_text().startswith("<?xml")
        assert rows_of(folder / "figures" / f"{name}.csv")


def test_a_finished_run_is_shown_and_not_repeated(recorded, monkeypatch, capsys):
    folder, arguments = recorded
    before = (folder / "samples.jsonl").read_text()
    assert invoke(arguments, monkeypatch) == 0
    assert "mass recall" in capsys.readouterr().out
    assert (folder / "samples.jsonl").read_text() == before


def test_a_run_resumes_after_the_last_finished_prompt(recorded, tiny_folder, tmp_path, monkeypatch):
    folder, _ = recorded
    arguments = ["runner=fidelity", "trace=record", "delta=1", *SMALL_FFD, *common(tiny_folder, tmp_path)]
    append = RunStore.append_sample

    def fails_on_the_second(store, row):
        if row["index"] == 1:
            raise RuntimeError("pulled plug")
        append(store, row)

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "append_sample", fails_on_the_second)
        assert invoke(arguments, monkeypatch) == 1
    resumed = the_run(tmp_path)
    assert summary_of(resumed)["status"] == "failed"
    assert invoke(arguments, monkeypatch) == 0
    assert resumed.name == folder.name
    one, two = summary_of(resumed), summary_of(folder)
    for block in ("fidelity", "metrics", "forced", "sparsity", "laws"):
        assert one[block] == two[block]


def test_replay_gives_what_the_run_observed(recorded, tmp_path, monkeypatch):
    folder, _ = recorded
    knobs = "{ffd: {delta: [1.0], block_size: [64], sub_block: [16], n_sink: [4], n_local: [16]}}"
    arguments = [*REPLAY, f"fidelity.traces={folder / 'traces'}", f"+fidelity.sweep={knobs}", f"out={tmp_path}"]
    assert invoke(arguments, monkeypatch) == 0
    (point,) = summary_of(the_run(tmp_path))["points"]
    run = summary_of(folder)
    for key in ("mass_recall", "lse_error_mean", "pseudo_max_gap_mean", "output_rel_error"):
        assert point[key] == pytest.approx(run["fidelity"][key], rel=1e-5, abs=1e-6)


def test_a_sweep_draws_frontiers_and_both_pseudo_maxima(recorded, tmp_path, monkeypatch, capsys):
    folder, _ = recorded
    arguments = [*REPLAY, f"fidelity.traces={folder / 'traces'}", SWEEP, f"out={tmp_path}"]
    assert invoke(arguments, monkeypatch) == 0
    swept = the_run(tmp_path)
    summary = summary_of(swept)
    assert len(summary["points"]) == 6
    assert {law["law"] for law in summary["laws"]} >= {
        "recall of topk grows with token_budget",
        "no recall exceeds dense's",
    }
    recall = rows_of(swept / "figures" / "recall_vs_sparsity.csv")
    assert {row["rule"] for row in recall} == {"topk", *RULES}
    gaps = {row["series"] for row in rows_of(swept / "figures" / "pseudo_max_gap.csv")}
    assert gaps == RULES
    assert (swept / "figures" / "lse_vs_sparsity.svg").exists()
    assert "topk token_budget=64" in capsys.readouterr().out


def test_a_text_is_followed_by_its_own_tokens(tiny_folder, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    arguments = [
        "runner=fidelity", f"fidelity.text_file={text}", "fidelity.prompts=2", "fidelity.prompt_tokens=200",
        "delta=1", *SMALL_FFD, *common(tiny_folder, tmp_path),
    ]  # fmt: skip
    assert invoke(arguments, monkeypatch) == 0
    summary = summary_of(the_run(tmp_path))
    assert summary["task"]["name"] == "text"
    assert summary["forced"]["tokens"] == 2 * 11
    assert summary["forced"]["perplexity_dense"] > 1


def test_dense_predicts_as_dense(tiny_folder, tmp_path, monkeypatch):
    assert invoke(["runner=fidelity", "method=dense", *common(tiny_folder, tmp_path, samples=1)], monkeypatch) == 0
    summary = summary_of(the_run(tmp_path))
    assert summary["forced"]["kl_max"] == 0
    assert summary["sparsity"]["keep_io"] == 1
    assert [law["holds"] for law in summary["laws"]] == [True] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace=replay"], "fidelity.traces=null: expected a trace file"),
        (["trace=maybe"], "trace=maybe: expected one of none, record, replay"),
        (["fidelity.every=0"], "fidelity.every=0: expected an integer >= 1"),
        (["fidelity.text_file=/nowhere.txt"], "fidelity.text_file=/nowhere.txt: cannot be read"),
        (["trace=replay", "+fidelity.sweep.quest.page_size=[5]"], "fidelity.sweep.quest.page_size=5: expected 16"),
        (
            ["trace=replay", "+fidelity.sweep.quest.method=null"],
            "fidelity.sweep.quest.method=null: expected the name of a method",
        ),
        (["trace=replay", "+fidelity.sweep.5={}"], "method=5: expected one of"),
        (["trace=replay", "fidelity.sweep=3"], "fidelity.sweep=3: expected series, each with knobs"),
        (["trace=record", "fidelity.layers=[7]"], "fidelity.layers=[7]: "),
    ],
)
def test_bad_requests_give_one_line(arguments, message, tiny_folder, tmp_path, monkeypatch, capsys):
    assert invoke(["runner=fidelity", *common(tiny_folder, tmp_path, follows=False), *arguments], monkeypatch) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def metrics(**values):
    names = ("mass_recall", "keep_head", "keep_io", "pseudo_max_gap", "set_recall_own_size")
    empty = dict.fromkeys(("min", "max", "macro"))
    return {name: {**empty, **values.get(name, {})} for name in names}


PATH = {"sparse_steps": 6, "dense_steps": 2, "expected_steps": 8}


def broken(laws):
    return [law.law for law in laws if not law.holds]


def test_laws_of_a_run_name_what_is_broken():
    predictions = {"kl_max": 0.5, "finite": True}
    assert broken(laws_of_a_run(FFD(), PATH, metrics(mass_recall={"max": 1.0}), predictions)) == []
    assert broken(laws_of_a_run(FFD(), {**PATH, "sparse_steps": 5}, metrics(), predictions)) == [
        "every configured layer-step took its path"
    ]
    assert broken(laws_of_a_run(FFD(), PATH, metrics(pseudo_max_gap={"min": -17.0}), predictions)) == [
        "the pseudo-maximum is not above the row's maximum (the fail-safe argument)"
    ]
    undefined = {"kl_max": None, "finite": False}
    assert broken(laws_of_a_run(FFD(), PATH, metrics(), undefined)) == ["every prediction is finite"]
    assert broken(laws_of_a_run(FFD(), PATH, metrics(), {**undefined, "finite": True})) == []
    oracle = create("topk")
    assert broken(laws_of_a_run(oracle, PATH, metrics(set_recall_own_size={"min": 0.99}), predictions)) == [
        "an exact oracle keeps the tokens of largest score"
    ]
    assert broken(laws_of_a_run(Dense(), PATH, metrics(), predictions)) == ["dense predicts as dense"]
    (void,) = (law for law in laws_of_a_run(FFD(), PATH, metrics(), predictions, empty="nothing") if not law.holds)
    assert (void.law, void.detail, void.voids) == ("every head attends to a token of finite score", "nothing", True)
    loaded = metrics(keep_head={"macro": 0.5}, keep_io={"macro": 0.4})
    assert broken(laws_of_a_run(FFD(), PATH, loaded, predictions)) == ["a group loads at least what a head selects"]


def point(name, keep, recall, exact=1.0, **knobs):
    return {
        "label": f"{name} {knobs}", "rule": name, "method": {"name": name, **knobs}, "keep_head": keep,
        "keep_io": keep, "mass_recall": recall, "set_recall_own_size": exact, "broken": None,
    }  # fmt: skip


def test_laws_of_a_sweep_name_what_is_broken():
    good = [
        point("topk", 0.1, 0.7, token_budget=10),
        point("topk", 0.5, 0.9, token_budget=50),
        point("ffd", 0.2, 0.6, delta=1.0),
        point("ffd", 0.4, 0.8, delta=2.0),
    ]
    assert broken(laws_of_a_sweep(good)) == []
    assert broken(laws_of_a_sweep([*good, point("ffd", 0.5, 0.75, delta=3.0)])) == ["recall of ffd grows with delta"]
    assert broken(laws_of_a_sweep([*good, point("quest", 0.2, 0.95, token_budget=128)])) == [
        "no approximation exceeds the exact oracles at equal cost"
    ]
    assert broken(laws_of_a_sweep([*good, point("topp", 0.2, 0.7, exact=0.9, p=0.7)])) == [
        "topp {'p': 0.7} keeps the tokens of largest score"
    ]
    assert broken(laws_of_a_sweep([*good, {**point("quest", 0.2, None), "broken": "not finite"}])) == [
        "every point is finite"
    ]
