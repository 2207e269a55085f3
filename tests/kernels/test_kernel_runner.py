"""The kernel runner over real kernels: a row of every method, a run that resumes; the clock is not looked at."""

from __future__ import annotations

import json

import pytest
import torch

from eval.fidelity.traces import Trace
from experiments.kernel import timing
from experiments.kernel.grid import Mode, Shape, point
from experiments.kernel.measure import PointRun
from experiments.kernel.rows import Refusal, Row
from experiments.kernel.session import Session
from experiments.kernel.source import captured
from ffd.methods import create, method_class, method_names
from tests.kernel_steps import ticking
from tests.run_in_process import invoke, only_run

SHAPE = Shape(1, 300, 4, 2, 32, "float16")
MODE = Mode("interpreted", "hot")
SPARSE = sorted(set(method_names()) - {"dense"})


@pytest.fixture(autouse=True)
def ticks(monkeypatch):
    """The clock is not looked at."""
    monkeypatch.setattr(timing, "duration", ticking())


@pytest.fixture(scope="module")
def dense():
    """The baselines, to be handed to every method's point."""
    session = Session()
    assert list(PointRun(point(SHAPE, {}, (), (MODE,)), 1.0, "cpu", session=session).rows()) == [
        *session.items.values()
    ]
    return session


def beside(dense):
    """The same process later."""
    session = Session(dense.items.values())
    session.dense = dict(dense.dense)
    return session


@pytest.mark.parametrize("name", SPARSE)
def test_every_method_has_gated_rows(name, dense):
    one = point(SHAPE, {name: {}}, (0.9,), (MODE,), stages=name == "ffd")
    items = list(PointRun(one, 1.0, "cpu", session=beside(dense)).rows())
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
    assert whole.best_dense_us == min(row.time_us for row in dense.rows)
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
    refused = {item.label.split()[0]: item.reason for item in dense.refused}
    assert refused == dict.fromkeys(("sdpa_flash", "sdpa_cudnn", "flashinfer"), "needs a GPU")


def test_a_knob_that_does_not_fit_the_shape_is_a_refusal(dense):
    (item,) = PointRun(
        point(SHAPE, {"kivi": {"group_size": 64}}, (0.9,), (MODE,)), 1.0, "cpu", session=beside(dense)
    ).rows()
    assert isinstance(item, Refusal)
    assert "group_size=64" in item.reason
    assert not item.wrong


def test_a_method_that_fails_is_a_refusal_and_the_next_is_timed(dense, monkeypatch):
    monkeypatch.setattr(method_class("topk"), "find_threshold", lambda *_: 1 / 0)
    one = point(SHAPE, {"topk": {}, "streaming": {}}, (0.9,), (MODE,))
    failed, row = PointRun(one, 1.0, "cpu", session=beside(dense)).rows()
    assert failed == Refusal(f"topk kept=0.9 {SHAPE.label}", "ZeroDivisionError: division by zero", wrong=True)
    assert row.method == "streaming"


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


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("engine.graph=false", "engine.graph=false: expected auto: runner=kernel times a layer, without an engine"),
        ("engine.fuse=true", "engine.fuse=true: expected auto: runner=kernel"),
        ("engine.prefill_chunk=64", "engine.prefill_chunk=64: expected null: runner=kernel"),
    ],
)
def test_an_engines_settings_are_refused(argument, said, tmp_path, monkeypatch, capsys):
    # They were passed over in silence: the same run for whatever was asked.
    assert invoke([*RUN, argument, f"out={tmp_path}/out"], monkeypatch) == 2
    assert said in capsys.readouterr().err


def test_a_run_without_a_time_of_its_method_says_that_it_is_partial(tmp_path, monkeypatch, capsys):
    # Exit code 0 and a table of dense rows looked like a result.
    assert invoke([*RUN, "method=kivi", "bench.d=32", "method.group_size=64", f"out={tmp_path}/out"], monkeypatch) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert "status partial: kivi was not timed: group_size=64" in out
    assert json.loads((only_run(tmp_path) / "summary.json").read_text())["status"] == "partial"
