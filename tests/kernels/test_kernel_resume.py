"""The kernel runner, torn and resumed: nothing is lost, nothing comes twice, what was wrong is tried again."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from experiments.errors import UsageError
from experiments.kernel import __main__ as bare
from experiments.kernel import baselines, timing
from experiments.kernel.baselines import Library
from experiments.kernel.grid import Mode, Shape, point
from ffd.methods import method_class
from tests.kernel_steps import ticking
from tests.run_in_process import invoke, only_run

SHAPE = Shape(1, 300, 4, 2, 32, "float16")
MODE, OTHER = Mode("interpreted", "hot"), Mode("interpreted", "cold")
MACHINE = {"gpu": "cpu", "versions": {}, "revision": "abc"}
DENSE, BOTH = point(SHAPE, {}, (), (MODE,)), point(SHAPE, {"streaming": {}}, (0.9,), (MODE,))
BASELINES = ["dense", "sdpa_flash", "sdpa_cudnn"]
RUN = [
    "runner=kernel", "method=topk", "bench.T=300", "bench.kept=[0.9,1.0]", "bench.G=2", "bench.Hkv=2", "bench.d=32",
    "bench.dtype=float16", "tracker=none",
]  # fmt: skip


def attend(step):
    return torch.nn.functional.scaled_dot_product_attention(
        step.q[:, :, None], step.keys, step.values, scale=step.scale, enable_gqa=True
    ).squeeze(2)


BROKEN = Library(lambda step: torch.zeros_like(step.q))


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """Two libraries on the CPU, and one that is not there; the clock is not looked at."""
    found = {"sdpa_flash": Library(attend), "sdpa_cudnn": Library(attend), "flashinfer": "not installed"}
    monkeypatch.setattr(baselines, "libraries", lambda _: dict(found))
    monkeypatch.setattr(timing, "duration", ticking())
    return found


@pytest.fixture
def out(tmp_path):
    return tmp_path / "kernel.json"


def measured(out, *points):
    """Exit code, and the record."""
    return bare.measure([(one, None) for one in points], out, MACHINE, "cpu"), json.loads(out.read_text())


def methods(record):
    return [row["method"] for row in record["rows"]]


def run(tmp_path, monkeypatch):
    """Exit code and summary of the same command once more."""
    code = invoke([*RUN, f"out={tmp_path}/out"], monkeypatch)
    return code, json.loads((only_run(tmp_path) / "summary.json").read_text())


def tear(tmp_path, whole_lines):
    """What a kill leaves when this many lines are on the disk."""
    folder = only_run(tmp_path)
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join(lines[:whole_lines]) + "".join(lines[whole_lines:])[:40])
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "status": "partial"}))


def test_the_bare_entry_writes_every_row_and_continues_its_record(out, monkeypatch, capsys):
    written = []
    write = bare.write_record
    monkeypatch.setattr(bare, "write_record", lambda path, made: (written.append(len(made["rows"])), write(path, made)))
    code, before = measured(out, DENSE)
    assert (code, methods(before), written) == (0, BASELINES, [1, 2, 3, 3, 3])
    code, after = measured(out, DENSE, point(SHAPE, {"streaming": {}, "topdelta": {}}, (0.9,), (MODE,)))
    assert (code, methods(after)) == (0, [*BASELINES, "streaming", "topdelta"])
    assert written[5:] == [4, 5, 5]
    assert after["rows"][:3] == before["rows"]
    assert after["read_bandwidth_bytes_per_us"] == before["read_bandwidth_bytes_per_us"]
    assert [item["refused"] for item in after["refused"]] == [f"flashinfer {SHAPE.label}"]
    assert after["gate"]["wrong"] == []
    assert "gate: passed" in capsys.readouterr().out
    with pytest.raises(UsageError, match="its revision is abc; expected def, named, or a new file"):
        bare.continued(out, {**MACHINE, "revision": "def"})  # was written over
    out.write_text(json.dumps({**after, "note": "2 processes"}))
    with pytest.raises(UsageError, match="was put together by --merge; expected a record of one --out"):
        measured(out, DENSE)


RECORD = {**MACHINE, "date": "2026-01-31", "read_bandwidth_bytes_per_us": 1, "rows": [], "refused": []}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "damaged"),
        ("[]", "expected a record with rows and refused"),
        (json.dumps({**RECORD, "rows": [{"method": "ffd"}]}), "row 1: knobs is missing"),
        (json.dumps({**RECORD, "refused": [3]}), "refusal 1: expected refused, reason, wrong"),
        (json.dumps({**RECORD, "revision": "def"}), "its revision is def; expected abc"),
    ],
)
def test_the_bare_entry_replaces_no_other_file(out, content, said):
    out.write_text(content)
    with pytest.raises(UsageError, match=said):
        measured(out)
    assert out.read_text() == content


class TestBaselines:
    """Dense attention beside the rows."""

    def test_one_that_the_gate_refused_is_tried_again(self, out, libraries):
        # The same command once more called the record complete: the libraries were not timed again, nor refused.
        libraries["sdpa_cudnn"] = BROKEN
        for _ in range(2):
            code, record = measured(out, BOTH)
            assert (code, methods(record)) == (1, ["dense", "sdpa_flash", "streaming"])
            assert [item["refused"] for item in record["gate"]["wrong"]] == [f"sdpa_cudnn {SHAPE.label}"]
        libraries["sdpa_cudnn"] = Library(attend)
        code, record = measured(out, BOTH)
        assert (code, record["gate"]["wrong"]) == (0, [])
        assert Counter(methods(record)) == Counter([*BASELINES, "streaming"])

    def test_rows_beside_too_few_are_timed_again_beside_all(self, out, libraries):
        # What was timed while a library was wrong would call another the fastest for good.
        libraries["sdpa_cudnn"] = BROKEN
        _, before = measured(out, BOTH)
        libraries["sdpa_cudnn"] = Library(attend)
        _, after = measured(out, BOTH)
        assert {tuple(row["beside"]) for row in before["rows"]} == {("dense", "sdpa_flash")}
        assert {tuple(row["beside"]) for row in after["rows"]} == {tuple(BASELINES)}
        times = {row["method"]: row["time_us"] for row in after["rows"]}
        fastest = min(times[name] for name in BASELINES)
        assert {(row["best_dense_us"], row["sdpa_flash_us"]) for row in after["rows"]} == {
            (fastest, times["sdpa_flash"])
        }
        assert measured(out, BOTH)[1]["rows"] == after["rows"], "nothing is left to time"

    def test_one_that_goes_wrong_later_is_tried_again(self, out, libraries):
        measured(out, DENSE)
        libraries["sdpa_cudnn"] = BROKEN
        code, record = measured(out, BOTH)
        assert (code, record["rows"][-1]["beside"]) == (1, ["dense", "sdpa_flash"])
        libraries["sdpa_cudnn"] = Library(attend)
        code, record = measured(out, BOTH)
        assert (code, methods(record), record["rows"][-1]["beside"]) == (0, [*BASELINES, "streaming"], BASELINES)

    def test_what_another_part_found_wrong_stays_wrong(self, out, libraries):
        libraries["sdpa_cudnn"] = BROKEN
        measured(out, BOTH)
        code, record = measured(out, point(Shape(1, 400, 4, 2, 32, "float16"), {}, (), (MODE,)))
        assert code == 1
        assert f"sdpa_cudnn {SHAPE.label}" in [item["refused"] for item in record["gate"]["wrong"]]

    @pytest.mark.parametrize("lost", [["sdpa_cudnn"], ["sdpa_flash", "sdpa_cudnn"], ["dense"], ["dense", "sdpa_flash"]])
    def test_lost_ones_alone_are_timed_again(self, out, lost):
        _, whole = measured(out, BOTH)
        kept = [row for row in whole["rows"] if row["method"] not in lost]
        out.write_text(json.dumps({**whole, "rows": kept}))
        code, again = measured(out, BOTH)
        assert (code, Counter(methods(again))) == (0, Counter([*BASELINES, "streaming"]))
        assert again["rows"][: len(kept)] == kept, "finished rows are not timed again"

    def test_rows_stand_beside_those_of_their_own_process(self, out):
        # A row of a resumed record had the dense times of the process before.
        _, before = measured(out, DENSE)
        _, after = measured(out, BOTH)
        assert after["rows"][:3] == before["rows"]
        earlier = {row["time_us"] for row in before["rows"]}
        row = after["rows"][3]
        assert row["beside"] == BASELINES
        assert not {row["sdpa_flash_us"], row["best_dense_us"]} & earlier

    def test_a_refusal_is_listed_once_for_all_modes(self, out):
        # A shape timed in two modes listed it twice.
        _, record = measured(out, DENSE, point(SHAPE, {}, (), (MODE, OTHER)))
        assert [item["refused"] for item in record["refused"]] == [f"flashinfer {SHAPE.label}"]
        assert methods(record) == BASELINES * 2
        assert [row["l2"] for row in record["rows"]] == ["hot"] * 3 + ["cold"] * 3

    def test_a_failure_of_one_costs_the_others_nothing(self, out, libraries):
        # Any error but the gate's lost our own rows too.
        libraries["sdpa_flash"] = Library(lambda step: step.nothing)
        code, record = measured(out, BOTH)
        assert (code, methods(record)) == (1, ["dense", "sdpa_cudnn", "streaming"])
        assert record["gate"]["wrong"][0]["reason"].startswith("AttributeError")

    def test_without_ours_there_is_no_reference_and_it_is_tried_again(self, out, monkeypatch):
        # The libraries had neither a time nor a refusal then.
        with monkeypatch.context() as broken:
            broken.setattr(method_class("dense"), "new_layer", lambda *_: 1 / 0)
            code, record = measured(out, BOTH)
        assert (code, methods(record)) == (1, ["streaming"])
        assert [item["reason"] for item in record["refused"]] == [
            "ZeroDivisionError: division by zero",
            *["no reference to compare with: ZeroDivisionError: division by zero"] * 3,
        ]
        code, record = measured(out, BOTH)
        assert (code, Counter(methods(record))) == (0, Counter([*BASELINES, "streaming"]))
        assert all(row["beside"] == BASELINES for row in record["rows"])


class TestRun:
    """The same through run.py."""

    def test_what_the_gate_refused_is_tried_again(self, tmp_path, monkeypatch):
        # A row that was wrong once, for want of memory or of a driver, kept its run invalid for ever.
        with monkeypatch.context() as broken:
            broken.setattr(method_class("topk"), "find_threshold", lambda *_: 1 / 0)
            assert run(tmp_path, broken)[0] == 3
        code, summary = run(tmp_path, monkeypatch)
        assert (code, summary["status"], summary["gate"]["wrong"]) == (0, "complete", [])
        assert methods(summary) == [*BASELINES, "topk", "topk"]

    def test_a_baseline_that_the_gate_refused_is_tried_again(self, tmp_path, monkeypatch, libraries):
        libraries["sdpa_cudnn"] = BROKEN
        for _ in range(2):
            code, summary = run(tmp_path, monkeypatch)
            assert (code, summary["status"], len(summary["gate"]["wrong"])) == (3, "invalid", 1)
        libraries["sdpa_cudnn"] = Library(attend)
        code, summary = run(tmp_path, monkeypatch)
        assert (code, summary["status"], summary["gate"]["wrong"]) == (0, "complete", [])
        assert Counter(methods(summary)) == Counter([*BASELINES, "topk", "topk"])
        assert all(row["beside"] == BASELINES for row in summary["rows"])
        lines = len((only_run(tmp_path) / "samples.jsonl").read_text().splitlines())
        tear(tmp_path, lines)
        assert run(tmp_path, monkeypatch)[1]["rows"] == summary["rows"], "the earlier verdict does not come back"

    @pytest.mark.parametrize("lines", [1, 4])
    def test_a_kill_at_any_row_loses_none(self, tmp_path, monkeypatch, lines):
        # After our own dense row it lost the libraries': what was resumed was complete without them.
        _, whole = run(tmp_path, monkeypatch)
        assert len((only_run(tmp_path) / "samples.jsonl").read_text().splitlines()) == 7
        tear(tmp_path, lines)
        code, again = run(tmp_path, monkeypatch)
        assert (code, again["status"]) == (0, "complete")
        assert Counter(methods(again)) == Counter(methods(whole))
        assert [item["refused"] for item in again["refused"]] == [item["refused"] for item in whole["refused"]]
        finished = min(lines - 1, len(BASELINES))
        assert again["rows"][:finished] == whole["rows"][:finished], "finished rows are not timed again"

    def test_a_finished_run_is_shown(self, tmp_path, monkeypatch, capsys):
        run(tmp_path, monkeypatch)
        capsys.readouterr()
        code, summary = run(tmp_path, monkeypatch)
        said = capsys.readouterr()
        assert code == 0
        assert "is finished" in said.err
        assert f"status complete · run {summary['run_id']}" in said.out
        assert json.loads((only_run(tmp_path) / "kernel.json").read_text())["rows"] == summary["rows"]

    def test_a_damaged_row_is_named_and_timed_again(self, tmp_path, monkeypatch, capsys):
        # It was a traceback, or a row under a label that is not its own.
        _, whole = run(tmp_path, monkeypatch)
        tear(tmp_path, 7)
        path = only_run(tmp_path) / "samples.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[-1]["T"], rows[-2]["time_us"] = 301, "x"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        capsys.readouterr()
        code, again = run(tmp_path, monkeypatch)
        said = " ".join(capsys.readouterr().err.split())
        assert (code, methods(again)) == (0, methods(whole))
        assert f'{rows[-2]["task"]}: time_us="x": expected a finite number > 0; counts as not done' in said
        assert f"{rows[-1]['task']}: has the fields of topk kept=1 B=1 T=301" in said
