"""The kernel runner over real kernels: a row of every method, a run that resumes; the clock is not looked at."""

from __future__ import annotations

import json
from itertools import count

import pytest
import torch

from eval.fidelity.traces import Trace
from experiments.errors import UsageError
from experiments.kernel import __main__ as bare
from experiments.kernel import timing
from experiments.kernel.grid import Mode, Shape, point
from experiments.kernel.measure import PointRun
from experiments.kernel.rows import Refusal, Row
from experiments.kernel.source import captured
from ffd.methods import create, method_class, method_names
from tests.run_in_process import invoke, only_run

SHAPE = Shape(1, 300, 4, 2, 32, "float16")
MODE = Mode("interpreted", "hot")
SPARSE = sorted(set(method_names()) - {"dense"})


@pytest.fixture(autouse=True)
def ticks(monkeypatch):
    """Every timing takes one us more than the one before; the steps run once."""
    times = count(1)

    def duration(step, calls, mode):
        step()
        return float(next(times))

    monkeypatch.setattr(timing, "duration", duration)


@pytest.fixture(scope="module")
def dense():
    """Rows of the baselines, to be handed to every method's point."""
    return {item.label: item for item in PointRun(point(SHAPE, {}, (), (MODE,)), 1.0, "cpu").rows()}


@pytest.mark.parametrize("name", SPARSE)
def test_every_method_has_gated_rows(name, dense):
    one = point(SHAPE, {name: {}}, (0.9,), (MODE,), stages=name == "ffd")
    items = list(PointRun(one, 1.0, "cpu", done=dense).rows())
    assert items, "below two blocks' worth nothing is timed"
    assert all(isinstance(item, Row) for item in items), items
    whole = items[0]
    assert whole.method == create(name).label
    assert whole.whole
    assert whole.rel_error < 5e-3
    assert whole.ledger_error == 0.0
    assert whole.sparse_steps == 1.0
    assert whole.kept == 1.0 if method_class(name).reads_everything else 0.6 < whole.kept <= 1.0
    assert whole.efficiency == pytest.approx(whole.floor_us / whole.time_us)
    assert whole.best_dense_us == min(row.time_us for row in dense.values() if isinstance(row, Row))
    assert [row.step for row in items[1:]] == (
        [["append", "threshold", "scan"], ["tail", "attend"], ["reduce"]] if name == "ffd" else []
    )


def test_captured_layers_are_timed_in_turn_and_kept_is_what_the_method_keeps(tmp_path):
    keys = {layer: torch.randn(1, 2, 300, 32, dtype=torch.float16) for layer in (0, 1)}
    trace = Trace(
        scale=0.2, keys=keys, values={}, queries={x: torch.randn(1, 1, 4, 32, dtype=torch.float16) for x in keys},
        lengths=torch.tensor([[300]], dtype=torch.int32), active=torch.ones(1, 1, dtype=torch.bool),
        prompt_lengths=torch.tensor([299], dtype=torch.int32),
    )  # fmt: skip
    trace.save(tmp_path / "vt-0.safetensors")
    ((shape, steps),) = captured(tmp_path / "vt-0.safetensors", "cpu")
    one = point(shape, {"topk": {"token_budget": 30}}, (None,), (MODE,))
    dense, *_, row = PointRun(one, 1.0, "cpu", captured=steps).rows()
    assert (dense.method, dense.source, row.method, row.source) == ("dense", "captured", "topk", "captured")
    assert (row.trace, row.kept_target) == ("vt-0 row 0", None)
    assert 0.1 <= row.kept <= 0.2 < dense.kept == 1.0
    assert row.best_dense_us == dense.time_us


def test_without_a_gpu_library_baselines_are_refused_with_the_reason(dense):
    refused = {item.label.split()[0]: item.reason for item in dense.values() if isinstance(item, Refusal)}
    assert refused == dict.fromkeys(("sdpa_flash", "sdpa_cudnn", "flashinfer"), "needs a GPU")


def test_a_knob_that_does_not_fit_the_shape_is_a_refusal(dense):
    (item,) = PointRun(point(SHAPE, {"kivi": {"group_size": 64}}, (0.9,), (MODE,)), 1.0, "cpu", done=dense).rows()
    assert isinstance(item, Refusal)
    assert "group_size=64" in item.reason
    assert not item.wrong


def test_a_method_that_fails_is_a_refusal_and_the_next_is_timed(dense, monkeypatch):
    monkeypatch.setattr(method_class("topk"), "find_threshold", lambda *_: 1 / 0)
    one = point(SHAPE, {"topk": {}, "streaming": {}}, (0.9,), (MODE,))
    failed, row = PointRun(one, 1.0, "cpu", done=dense).rows()
    assert failed == Refusal(f"topk kept=0.9 {SHAPE.label}", "ZeroDivisionError: division by zero", wrong=True)
    assert row.method == "streaming"


def test_the_bare_entry_writes_every_row_and_continues_its_record(tmp_path, monkeypatch, capsys):
    out, machine = tmp_path / "kernel.json", {"gpu": "cpu", "versions": {}, "revision": "abc"}
    first, second = (point(SHAPE, methods, (0.9,), (MODE,)) for methods in ({}, {"streaming": {}, "topdelta": {}}))
    written = []
    write = bare.write
    monkeypatch.setattr(bare, "write", lambda path, made: (written.append(len(made["rows"])), write(path, made)))
    assert bare.measure([(first, None)], out, machine, "cpu") == 0
    before = json.loads(out.read_text())
    assert bare.measure([(first, None), (second, None)], out, machine, "cpu") == 0
    after = json.loads(out.read_text())
    assert after["rows"][:1] == before["rows"]
    assert [row["method"] for row in after["rows"]] == ["dense", "streaming", "topdelta"]
    assert after["read_bandwidth_bytes_per_us"] == before["read_bandwidth_bytes_per_us"]
    assert written == [1, 1, 1, 1, 1, 2, 3, 3], "three libraries are refused beside the first row"
    assert len(after["refused"]) == 3
    assert after["gate"]["wrong"] == []
    assert "gate: passed" in capsys.readouterr().out
    with pytest.raises(UsageError, match="its revision is abc; expected def, named, or a new file"):
        bare.stored(out, {**machine, "revision": "def"})  # was written over


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "damaged"),
        ("[]", "expected a record with rows and refused"),
        ('{"rows": [{"method": "ffd"}], "refused": [], "revision": "abc"}', "its rows are of another version"),
        ('{"rows": [], "refused": [3], "revision": "abc"}', "its rows are of another version"),
        ('{"rows": [], "refused": [], "revision": "def"}', "its revision is def; expected abc"),
    ],
)
def test_the_bare_entry_replaces_no_other_file(tmp_path, content, said):
    path = tmp_path / "kernel.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=said):
        bare.measure([], path, {"revision": "abc"}, "cpu")
    assert path.read_text() == content


RUN = ["runner=kernel", "bench.T=300", "bench.G=2", "bench.Hkv=2", "bench.stages=false", "tracker=none"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench.T=[300,100]"], "bench.T=100: expected at least 256 tokens with bench.source=planted"),
        (["bench.kept=[1.0,0.001]"], "bench.kept=0.001: expected at least 256 tokens, which bench.T=300 has not"),
    ],
)
def test_what_cannot_be_planted_is_refused(arguments, said, tmp_path, monkeypatch, capsys):
    # The first was an error inside torch that was stored as a wrong kernel; the second left dense alone, complete.
    assert invoke([*RUN, *arguments, f"out={tmp_path}/out"], monkeypatch) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out" / "runs").iterdir())


def test_a_run_without_a_time_of_its_method_is_not_complete(tmp_path, monkeypatch):
    assert invoke([*RUN, "bench.d=20", "bench.kept=1.0", f"out={tmp_path}/out"], monkeypatch) == 0
    summary = json.loads((only_run(tmp_path) / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == (
        "partial",
        "ffd was not timed: head_dim=20: expected a multiple of 8",
    )


def test_what_the_gate_refused_is_tried_again(tmp_path, monkeypatch):
    # A row that was wrong once, for want of memory or of a driver, kept its run invalid for ever.
    command = [*RUN, "method=topk", "bench.d=32", "bench.kept=0.9", f"out={tmp_path}/out"]
    with monkeypatch.context() as broken:
        broken.setattr(method_class("topk"), "find_threshold", lambda *_: 1 / 0)
        assert invoke(command, broken) == 3
    assert invoke(command, monkeypatch) == 0
    summary = json.loads((only_run(tmp_path) / "summary.json").read_text())
    assert (summary["status"], summary["gate"]["wrong"]) == ("complete", [])
    assert [row["method"] for row in summary["rows"]] == ["dense", "topk"]


def test_a_run_keeps_each_row_and_resumes_where_it_was_torn(tmp_path, monkeypatch, capsys):
    command = [
        "runner=kernel", "method=ffd", "bench.T=300", "bench.kept=[0.9,1.0]", "bench.G=2", "bench.Hkv=2",
        "bench.d=32", "bench.dtype=float16", "bench.stages=false", "tracker=none", f"out={tmp_path}/out",
    ]  # fmt: skip
    assert invoke(command, monkeypatch) == 0
    folder = only_run(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "complete"
    assert [(r["method"], r["kept_target"]) for r in summary["rows"]] == [("dense", 1.0), ("ffd", 0.9), ("ffd", 1.0)]
    assert summary["regret_guard"]["holds"]
    assert json.loads((folder / "kernel.json").read_text())["rows"] == summary["rows"]

    kept = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join(kept[:-1]) + kept[-1][:40])
    (folder / "summary.json").write_text(json.dumps({**summary, "status": "partial"}))
    capsys.readouterr()
    assert invoke(command, monkeypatch) == 0
    again = json.loads((folder / "summary.json").read_text())
    assert again["rows"][:2] == summary["rows"][:2], "finished rows are not timed again"
    assert again["rows"][2]["kept"] == 1.0
    assert "ffd kept=0.9" not in capsys.readouterr().err
    assert invoke(command, monkeypatch) == 0
    assert "is finished" in capsys.readouterr().err
