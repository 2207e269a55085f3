"""From stored runs to tables, figures and the report; nothing silently missing, every number traceable."""

from __future__ import annotations

import csv
import json
import re
from xml.etree import ElementTree

import pytest

from analysis import __main__ as command
from analysis.comparison import compare
from analysis.drawing import svg
from analysis.figures import build_figures
from analysis.labels import distinct_labels
from analysis.load import LoadError, load
from analysis.measurements import Timing
from analysis.pairing import PairingError
from analysis.pareto import pareto
from analysis.published import published
from analysis.tables import build_tables
from tests.analysis_outputs import job, write_run, write_sweep

DENSE, FFD = {"name": "dense"}, {"name": "ffd", "delta": 7.0, "delta_unit": "nat"}


@pytest.fixture
def outputs(tmp_path):
    """RULER by dense (complete), FFD (partial), KIVI (failed), Quest (non-official)."""
    scores = {"vt": [1.0, 0.0, 0.5, 1.0], "niah_single_1": [1.0, 1.0, 1.0, 1.0]}
    write_run(tmp_path, "dense-1", DENSE, scores)
    worse = {"vt": [1.0, 0.0, 0.25, 0.5], "niah_single_1": [1.0, 0.0, 1.0, 1.0]}
    write_run(tmp_path, "ffd-1", FFD, worse, status="partial", reason="no data for qa_1")
    quest = {"name": "quest", "token_budget": 256}
    write_run(tmp_path, "quest-1", quest, scores, validity={"official_data": False})
    kivi = job(None, "failed", "group_size=32: expected a divisor of head_dim=16", "method=kivi")
    write_sweep(tmp_path, "ruler_32k", [job("dense-1"), job("ffd-1", "partial"), kivi, job("quest-1")])
    write_sweep(tmp_path, "headwise", [job("ffd-1")])
    write_sweep(tmp_path, "sparsity_by_layer", [job("ffd-1")])
    write_sweep(tmp_path, "retrieval_quality", [job("ffd-1"), job("quest-1")])
    write_sweep(tmp_path, "longbench", [job(None, "skipped", "needs LongBench's data")])
    return tmp_path


def table(outputs, name):
    return next(t for t in build_tables(load(outputs)) if t.name == name)


def cell(outputs, name, row, column):
    found = table(outputs, name)
    return dict(found.rows)[row][found.columns.index(column)]


def test_a_cell_has_its_number_interval_n_runs_and_the_papers_number(outputs):
    found = cell(outputs, "ruler_32k", "vt", "dense")
    assert (found.value, found.interval, found.n) == (62.5, (0.0, 100.0), 4)
    assert found.run_ids == ("dense-1",)
    assert found.published == "99.6"
    assert "2609.00097" in found.source
    assert found.marks == ()


def test_an_average_says_how_many_samples_it_has(outputs):
    found = cell(outputs, "ruler_32k", "average", "dense")
    assert found.n == sum(c[0].n for name, c in table(outputs, "ruler_32k").rows if name != "average" and c[0].n)


def test_what_is_wrong_is_marked_with_its_reason(outputs):
    assert cell(outputs, "ruler_32k", "vt", "ffd delta=7").marks == ("partial",)
    assert cell(outputs, "ruler_32k", "vt", "quest token_budget=256").marks == ("non-official",)
    failed = cell(outputs, "ruler_32k", "vt", "kivi")
    assert failed.marks == ("failed",)
    assert failed.value is None
    explained = "\n".join(table(outputs, "ruler_32k").explained)
    assert "kivi: failed: group_size=32" in explained
    assert "no data for qa_1" in explained


def test_a_recipe_that_was_not_run_says_how_and_one_that_cannot_says_why(outputs):
    assert "python run.py experiment=component_accuracy" in table(outputs, "component_accuracy").heading[0]
    assert "needs LongBench's data" in table(outputs, "longbench").heading[0]


def test_undefined_is_not_zero(outputs):
    found = cell(outputs, "retrieval_quality", "quest token_budget=256", "Spearman")
    assert found.number == "undefined"
    assert found.reason == "the selector made no estimate"
    same = dict(table(outputs, "ruler_32k_paired").rows)["quest token_budget=256, vt"]
    assert [c.number for c in same] == ["0.00", "undefined", "undefined", "0.961", "undefined"]


def test_headwise_statistics_are_those_of_the_layer_table(outputs):
    rows = dict(table(outputs, "headwise").rows)
    assert rows["smallest kept share, %"][0].value == pytest.approx(10)
    assert rows["largest kept share, %"][0].value == pytest.approx(40)
    assert rows["standard deviation over pairs, points"][0].value == pytest.approx(11.18, abs=0.01)
    assert rows["standard deviation over pairs, points"][0].published == "14.14 pp"


def test_sparsity_by_layer_counts_every_kv_head_once(outputs):
    rows = dict(table(outputs, "sparsity_by_layer").rows)
    assert rows["average, %"][0].value == 75
    assert [rows[f"layer {i}"][0].value for i in (0, 1)] == pytest.approx([80, 60])


def test_every_published_number_is_somewhere(outputs):
    shown = set()
    for found in build_tables(load(outputs)):
        notes = " ".join(found.notes)
        quoted = {c.published for c in found.cells if c.published}
        shown |= {
            p
            for p in published()
            if p.text in notes or any(p.text in q or f"{p.value} {p.unit} (" in q for q in quoted)
        }
    assert shown == set(published())


def test_times_name_their_record_and_stand_beside_the_papers(outputs):
    row = {"method": "ffd", "B": 1, "T": 262080, "Hq": 32, "Hkv": 8, "d": 128, "dtype": "bfloat16", "l2": "cold"}
    steps = [
        {**row, "kept_target": 0.18, "time_us": 83.2, "step": ["attend", "reduce"]},
        {**row, "kept_target": 0.18, "time_us": 40.0, "step": ["scan"]},
        {**row, "kept_target": 1.0, "method": "sdpa_flash", "time_us": 286.2, "step": ["attend", "reduce"]},
    ]
    (outputs / "measurements").mkdir()
    record = {"gpu": "NVIDIA H200", "rows": steps}
    (outputs / "measurements" / "kernel.json").write_text(json.dumps(record))
    found = table(outputs, "kernel_latency")
    assert found.heading == ("your runs: NVIDIA H200, Hq=32 Hkv=8 d=128 bfloat16, cold L2",)
    ffd, flash = dict(found.rows)["B=1 T=262080, 18 % kept"]
    assert (ffd.value, ffd.run_ids, ffd.published) == (83.2, ("kernel.json",), "0.17 ms (RTX 4090)")
    assert flash.published == "1.12 ms (RTX 4090)"


def test_random_weights_are_headed_as_such(tmp_path):
    folder = write_run(tmp_path, "dense-r", DENSE, {"vt": [0.0]})
    (folder / "config.yaml").write_text("model: {path: models/random-qwen2}\n")
    write_sweep(tmp_path, "qwen", [job("dense-r")])
    assert table(tmp_path, "qwen_ruler").heading[0].startswith("RANDOM WEIGHTS")


def test_the_largest_size_is_shown_unless_one_is_named(outputs):
    write_run(outputs, "dense-2", DENSE, {"vt": [0.0]})
    write_sweep(outputs, "ruler_32k", [job("dense-2")], size="paper")
    assert cell(outputs, "ruler_32k", "vt", "dense").run_ids == ("dense-2",)
    smoke = next(t for t in build_tables(load(outputs), "smoke") if t.name == "ruler_32k")
    assert "dense-1" in {i for c in smoke.cells for i in c.run_ids}


def test_foreign_and_torn_folders_are_skipped_with_a_line(outputs, capsys):
    runs = outputs / "runs"
    (runs / "empty").mkdir()
    (runs / "torn").mkdir()
    (runs / "torn" / "summary.json").write_text('{"run_id": "to')
    (runs / "dense-1").rename(runs / "renamed")
    (runs / "note.txt").write_text("mine")
    (outputs / "sweeps" / "broken.json").write_text("[]")
    assert command.main(["runs", "--out", str(outputs)]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("skipped") == 5
    assert "skipped runs/renamed: summary.json is of run dense-1" in captured.err
    assert "ffd-1" in captured.out


def test_a_torn_last_sample_is_left_out(outputs):
    path = outputs / "runs" / "dense-1" / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert len(load(outputs).runs["dense-1"].samples) == 7


def test_different_prompts_are_refused(outputs, tmp_path, capsys):
    write_run(outputs, "other-1", FFD, {"vt": [1.0]}, prompts="another seed")
    runs = load(outputs).runs
    with pytest.raises(PairingError, match=r"ran different prompts \(first: vt 0\)"):
        compare(runs["dense-1"], runs["other-1"])
    assert command.main(["compare", "dense-1", "other-1", "--out", str(outputs)]) == 2
    assert capsys.readouterr().err.count("error:") == 1


def test_samples_without_a_counterpart_are_named(outputs):
    write_run(outputs, "short-1", FFD, {"vt": [1.0, 1.0]})
    runs = load(outputs).runs
    compared = compare(runs["dense-1"], runs["short-1"])
    assert [row.n for row in compared.rows] == [2]
    assert "6 samples of dense-1 have no counterpart and are left out" in compared.notes


def test_documents_are_the_unit(tmp_path):
    for name, values in (("a", [0.0] * 4), ("b", [1.0] * 4)):
        write_run(tmp_path, name, DENSE, {"vt": values}, documents=["x", "x", "y", "y"])
    runs = load(tmp_path).runs
    (row,) = compare(runs["a"], runs["b"]).rows
    assert (row.n, row.documents) == (4, 2)
    assert row.p.value == pytest.approx(0.5)  # two documents: 2 of 4 sign patterns are as extreme


def test_the_commands_write_every_format_and_one_offline_page(outputs, capsys):
    assert command.main(["report", "--out", str(outputs)]) == 0
    folder = outputs / "analysis"
    names = {t.name for t in build_tables(load(outputs))}
    assert {p.name for p in (folder / "tables").iterdir()} == {n + s for n in names for s in (".md", ".tex", ".csv")}
    tex = (folder / "tables" / "ruler_32k.tex").read_text()
    assert r"\toprule" in tex
    assert tex.count("{") == tex.count("}")
    rows = list(csv.DictReader((folder / "tables" / "ruler_32k.csv").open()))
    assert {"dense-1", "ffd-1", "quest-1"} <= {r["run_ids"] for r in rows}
    page = (folder / "report.html").read_text()
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page.replace("http://www.w3.org", ""))
    assert "group_size=32" in page
    # Runs that no recipe asks for were counted and shown nowhere.
    listed = page[page.index('<section id="runs">') :].split("</section>")[0]
    assert all(f"<td>{run_id}</td>" in listed for run_id in load(outputs).runs)
    figures = {p.stem for p in (folder / "figures").glob("*.svg")}
    assert figures == {p.stem for p in (folder / "figures").glob("*.csv")}
    assert {"recall_kept", "sparsity_by_layer", "keep_heads", "keep_distribution", "pareto_accuracy_bytes"} <= figures
    for path in (folder / "figures").glob("*.svg"):
        ElementTree.parse(path)


def test_runs_stand_at_the_kernel_time_of_their_own_method_and_kept_share(outputs):
    def row(method, kept, time_us, T, **changes):
        usual = {"B": 1, "T": T, "kept": kept, "kept_target": kept, "step": ["attend", "reduce"], "time_us": time_us}
        return Timing("kernel.json", "a GPU", "", {"method": method, **usual, **changes})

    timings = [
        row("ffd", 0.2, 10.0, 1024),
        row("ffd", 0.4, 30.0, 1024),
        row("ffd", 0.25, 99.0, 4096),  # another length
        row("ffd", 0.25, 99.0, 1024, l2="hot"),
        row("quest", 0.5, 40.0, 1024),
        row("dense", 1.0, 50.0, 1024),
    ]
    runs = [load(outputs).runs[name] for name in ("ffd-1", "quest-1", "dense-1")]
    figures = {figure.name: figure for figure in pareto(runs, runs, timings)}
    (ffd,) = figures["pareto_recall_kernel"].series  # quest's and dense's share, 0.25 here, was not timed
    assert ffd.x == pytest.approx((15.0,))
    assert (ffd.y, ffd.names) == ((0.97,), ("ffd-1",))
    assert figures["pareto_recall_kernel"].x_label == "us per layer step at 1024 tokens, a GPU"
    assert figures["pareto_accuracy_bytes"].series[0].x == (0.3,)


def test_figures_repeat_byte_by_byte(outputs):
    (first,) = (f for f in build_figures(load(outputs)) if f.name == "keep_heads")
    assert svg(first) == svg(first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "dense-1", "nowhere"], "nowhere: no such run"),
        (["compare", "dense-1", "dense-1", "--margin", "0"], "margin=0: expected a number between 0 and 100"),
    ],
)
def test_bad_requests_get_one_line(outputs, capsys, arguments, message):
    assert command.main([*arguments, "--out", str(outputs)]) == 2
    assert message in capsys.readouterr().err


def test_no_outputs_folder(tmp_path, capsys):
    assert command.main(["runs", "--out", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
    with pytest.raises(LoadError):
        load(tmp_path / "nowhere")


def test_labels_tell_methods_of_one_name_apart():
    first, second = {**FFD, "sub_block": 32}, {**FFD, "sub_block": None}
    log2 = {**FFD, "delta": 5.0, "delta_unit": "log2"}
    assert distinct_labels([first, second, log2, DENSE]) == [
        "ffd delta=7 sub_block=32",
        "ffd delta=7",
        "ffd delta=5 log2",
        "dense",
    ]
