"""What a report shows first, and what it does not say: one's own results, and no gaps that nobody asked to fill."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from analysis import __main__ as command
from analysis.cells import Cell, Table
from analysis.figures import build_figures
from analysis.load import load
from analysis.tables import build_tables
from tests.analysis_outputs import job, write_run, write_sweep

DENSE, FFD = {"name": "dense"}, {"name": "ffd", "delta": 7.0, "delta_unit": "nat"}
SCORES = {"vt": [1.0, 0.0]}
NO_GPU = "needs a GPU; size=smoke runs without one"
COMMITTED = "(committed: NVIDIA H200, revision "
STEP = {
    "method": "ffd", "protocol": "fair", "B": 1, "T": 16384, "kept": 0.2, "kept_target": 0.18,
    "tokens_per_second": 10.0, "ms_per_step": 100.0, "over_floor": 2.0,
}  # fmt: skip


def table(out: Path, name: str, size: str | None = None) -> Table:
    return next(t for t in build_tables(load(out), size) if t.name == name)


def cell(out: Path, row: str, column: str, name: str = "ruler_32k") -> Cell:
    found = table(out, name)
    return dict(found.rows)[row][found.columns.index(column)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A finished smoke size of one recipe."""
    write_run(tmp_path, "dense-1", DENSE, SCORES)
    write_run(tmp_path, "ffd-1", FFD, SCORES)
    write_sweep(tmp_path, "ruler_32k", [job("dense-1"), job("ffd-1")])
    return tmp_path


def shown(out: Path) -> set[str]:
    return {run_id for c in table(out, "ruler_32k").cells for run_id in c.run_ids}


def test_a_skipped_size_does_not_hide_a_smaller_one_that_has_results(out: Path) -> None:
    # The default size, tried first and skipped, was the largest recorded: every cell was missing.
    write_sweep(out, "ruler_32k", [job(None, "skipped", NO_GPU)], size="small")
    assert cell(out, "vt", "dense").value == 50.0
    assert shown(out) == {"dense-1", "ffd-1"}
    heading = table(out, "ruler_32k").heading
    assert heading == (
        "your runs: smollm2_135m, cpu, 1024 tokens, size=smoke",
        f"larger size=small not shown: skipped: {NO_GPU}",
    )
    assert table(out, "ruler_32k_paired").heading == heading


@pytest.mark.parametrize(
    ("jobs", "told"),
    [
        ([job(None, "failed", "CUDA out of memory")] * 2, "2 failed (--size paper shows it)"),
        ([job(None, "planned", "3 samples to run, 2732 prompt tokens")], "1 planned"),
        ([job("cut-1"), job(None, "missing", "not run yet")], "1 partial, 1 missing (--size paper shows it)"),
    ],
    ids=["failed", "planned", "cut short"],
)
def test_a_size_without_a_finished_run_does_not_hide_one_that_has(out: Path, jobs: list, told: str) -> None:
    write_run(out, "cut-1", DENSE, SCORES, status="partial", reason="interrupted; the same command resumes")
    write_sweep(out, "ruler_32k", jobs, size="paper")
    assert shown(out) == {"dense-1", "ffd-1"}
    assert table(out, "ruler_32k").heading[1] == f"larger size=paper not shown: {told}"


def test_the_largest_size_is_shown_that_has_one_finished_run_among_failures(out: Path) -> None:
    write_run(out, "dense-2", DENSE, SCORES, status="partial", reason="no data for qa_1")  # all others are whole
    write_sweep(out, "ruler_32k", [job("dense-2"), job(None, "failed", "out of memory", "method=kivi")], size="small")
    assert shown(out) == {"dense-2"}
    assert cell(out, "vt", "kivi").marks == ("failed",)
    assert len(table(out, "ruler_32k").heading) == 1


def test_what_was_cut_short_is_shown_where_nothing_else_is(tmp_path: Path) -> None:
    write_run(tmp_path, "cut-1", DENSE, SCORES, status="partial", reason="interrupted; the same command resumes")
    write_sweep(tmp_path, "ruler_32k", [job("cut-1", "interrupted")])
    write_sweep(tmp_path, "ruler_32k", [job(None, "skipped", NO_GPU)], size="small")
    assert cell(tmp_path, "vt", "dense").marks == ("partial",)


def test_a_plan_of_earlier_versions_is_no_reason_and_no_result(tmp_path: Path) -> None:
    # "3 samples to run, ..." was why a cell was missing.
    write_sweep(tmp_path, "ruler_32k", [job(None, "planned", "3 samples to run, 2732 prompt tokens", "method=dense")])
    assert command.main(["report", "--out", str(tmp_path)]) == 0
    written = "".join(p.read_text() for p in (tmp_path / "analysis").rglob("*.*") if p.suffix != ".svg")
    assert "samples to run" not in written
    assert table(tmp_path, "ruler_32k").heading == (
        "not run: only planned; python run.py experiment=ruler_32k size=smoke",
    )


def test_what_nobody_asked_for_is_not_missing(out: Path) -> None:
    # Dozens of "missing: no run has this cell": the paper's tasks and methods, and gaps of committed records.
    unasked = cell(out, "niah_single_3", "ffd delta=7")
    assert (unasked.marks, unasked.reason, unasked.number) == ((), None, "-")
    assert unasked.published == "99.0 (margin not stated)"
    assert cell(out, "average", "kivi").published == "82.3"  # no job of ours
    assert not [c for t in build_tables(load(out)) for c in t.cells if "missing" in c.marks]


def test_what_was_asked_for_is_missing_with_its_reason(tmp_path: Path) -> None:
    task = {"name": "ruler", "length": 1024, "tasks": ["vt", "cwe", "niah_single_3"]}
    lost = [{"task": "niah_single_3", "reason": "the data is not here"}]
    cut = {"status": "partial", "reason": "interrupted; the same command resumes"}
    write_run(tmp_path, "ffd-1", FFD, SCORES, task=task, skipped=lost, **cut)
    write_run(tmp_path, "dense-1", DENSE, {"vt": [1.0], "cwe": [1.0]}, task=task | {"tasks": ["vt", "cwe"]})
    gone = job(None, "interrupted", "the same command resumes", "method=quest")
    write_sweep(tmp_path, "ruler_32k", [job("ffd-1"), job("dense-1"), gone])
    assert cell(tmp_path, "cwe", "ffd delta=7").marks == ("missing",)
    assert cell(tmp_path, "cwe", "ffd delta=7").reason == f"ffd delta=7: cwe: {cut['reason']}"
    assert cell(tmp_path, "niah_single_3", "ffd delta=7").reason == "ffd delta=7: niah_single_3: the data is not here"
    assert cell(tmp_path, "niah_single_3", "dense").marks == ()
    assert cell(tmp_path, "vt", "quest").marks == ("missing",)


def test_rows_of_committed_records_say_so_with_gpu_and_revision(out: Path) -> None:
    # They stood under "ours", told from one's own by hovering.
    for name in ("kernel_latency", "kernel_speedup", "kernel_stages", "kernel_components", "throughput", "prefill"):
        found = table(out, name)
        assert found.rows
        assert all(COMMITTED in label for label, _ in found.rows), name
        assert all(re.match(r"committed \S+\.json: NVIDIA H200, revision \w{7}, ", line) for line in found.heading)
    (figure,) = (f for f in build_figures(load(out)) if f.name == "kernel_latency")
    assert re.search(r", NVIDIA H200, revision \w{7}, committed$", figure.title)


def test_ones_own_times_come_first_and_unmarked_and_stay_apart_from_a_record_of_the_same_shape(out: Path) -> None:
    write_run(out, "timed-1", FFD, SCORES, rows=[STEP])
    found = table(out, "throughput")
    (first, cells), *others = found.rows
    assert first == "B=1 T=16384 fair ffd kept 18 % (cpu)"
    assert cells[0].run_ids == ("timed-1",)
    assert found.heading[0] == "your runs: cpu, smollm2_135m"
    assert others
    assert all(COMMITTED in label for label, _ in others)
    row = {"method": "ffd", "B": 1, "T": 16320, "Hq": 32, "Hkv": 8, "d": 128, "dtype": "bfloat16", "kept_target": 0.18}
    write_run(out, "layer-1", FFD, SCORES, rows=[{**row, "time_us": 9999.0, "step": ["attend", "reduce"]}])
    (first, (mine, *_)), *_ = table(out, "kernel_latency").rows
    assert (first, mine.value, mine.run_ids) == ("B=1 T=16320, 18 % kept", 9999.0, ("layer-1",))
    # One device and model to a column: one's own, however many methods the record has.
    speed = table(out, "component_speed")
    assert {i for c in speed.cells for i in c.run_ids} == {"timed-1"}
    assert speed.notes[0].startswith("not timed: V1")


def test_the_page_has_ones_own_runs_first_then_committed_records_then_what_was_not_run(out: Path) -> None:
    write_run(out, "timed-1", FFD, SCORES, rows=[STEP])
    assert command.main(["report", "--out", str(out)]) == 0
    page = (out / "analysis" / "report.html").read_text()
    order = [
        '<section id="runs">', '<section id="ruler_32k">', '<section id="throughput">',  # with records' rows too
        "<h2>Committed records", '<section id="kernel_latency">', '<figure id="figure-kernel_latency">',
        "<h2>Not run here</h2>", '<section id="longbench">',
    ]  # fmt: skip
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    assert page.count("<section ") == len(build_tables(load(out))) + 1


def test_the_report_names_the_page_to_open_and_the_other_files_only_when_asked(out: Path, capsys) -> None:
    # The page stood below 75 paths.
    folder = out / "analysis"
    assert command.main(["report", "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    beside = {str(path) for kind in ("tables", "figures") for path in (folder / kind).iterdir()}
    assert said == [f"{folder / 'report.html'} (beside it {len(beside)} files of its tables and figures)"]
    assert command.main(["report", "--verbose", "--out", str(out)]) == 0
    *others, last = capsys.readouterr().out.splitlines()
    assert (set(others), last) == (beside, said[0])
