"""The kernel runner's parts that need no kernel: options, gate, layers, captured keys, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from eval.fidelity.traces import Trace
from experiments.bench_config import bench_options
from experiments.errors import UsageError
from experiments.kernel import timing
from experiments.kernel.baselines import copies
from experiments.kernel.gate import Expected, GateError, check, expected, run
from experiments.kernel.grid import Shape, point
from experiments.kernel.layers import fill
from experiments.kernel.measure import plain
from experiments.kernel.source import Planting, captured
from experiments.kernel.stages import floor_bytes, stages, whole_step
from ffd.methods import create
from tests.kernel_steps import TINY, passed_with, reference_layer
from tests.run_in_process import invoke

DEFAULTS = {
    "B": None, "T": None, "kept": None, "G": 4, "Hkv": 8, "d": 128, "dtype": "bfloat16", "l2": "cold",
    "timing": "graph", "stages": True, "source": "planted", "traces": None,
}  # fmt: skip


def bench(**changes: object):
    return bench_options({**known_defaults(), **changes})


def known_defaults() -> dict[str, object]:
    """The shipped block, other runners' keys included."""
    config = Path(__file__).resolve().parent.parent / "conf" / "config.yaml"
    return dict(yaml.safe_load(config.read_text())["bench"])


def test_shipped_defaults_are_those_that_the_runner_documents():
    assert {key: known_defaults()[key] for key in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("T", "x", "bench.T=x: expected an integer"),
        ("T", [], "bench.T=[]: expected"),
        ("B", [1, 0], "bench.B=0: expected"),
        ("kept", 0, "bench.kept=0: expected a number in (0, 1]"),
        ("kept", [0.5, 1.5], "bench.kept=1.5"),
        ("T", [[1]], "bench.T=[1]: expected an integer"),
        ("T", {"a": 1}, "bench.T={'a': 1}: expected an integer"),
        ("B", [1, True], "bench.B=true: expected an integer"),
        ("kept", [[0.5]], "bench.kept=[0.5]: expected a number in (0, 1]"),
        ("dtype", [{"a": 1}], "bench.dtype={'a': 1}: expected one of bfloat16, float16"),
        ("dtype", "int8", "bench.dtype=int8: expected one of bfloat16, float16"),
        ("l2", "warm", "bench.l2=warm: expected one of cold, hot"),
        ("timing", "clock", "bench.timing=clock"),
        ("stages", 1, "bench.stages=1: expected true or false"),
        ("source", "captured", "bench.traces=null: expected a trace file"),
        ("traces", "/x", "bench.source=planted: expected captured"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(key, value, said):
    with pytest.raises(UsageError, match=r"^bench\.") as error:
        bench(**{key: value})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_one_value_or_a_list_without_repetitions():
    options = bench(T=4096, kept=[0.1, 0.1, 1])
    assert (options.T, options.kept, options.B) == ((4096,), (0.1, 1.0), None)


def test_without_a_gpu_the_runner_ends_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert invoke(["runner=kernel", f"out={tmp_path}/out"], monkeypatch) == 2
    assert capsys.readouterr().err == "error: runner=kernel: needs a GPU, and none is visible\n"
    assert not (tmp_path / "out").exists()


def test_the_step_stores_the_last_token():
    step = Planting(TINY, "cpu").step(1.0)
    layer, _ = reference_layer("dense", TINY, step)
    assert layer.lengths.tolist() == [TINY.T]
    assert not torch.equal(layer.keys[:, :, : TINY.T], step.keys)
    run(layer, step)
    assert torch.equal(layer.keys[:, :, : TINY.T], step.keys)


class TestGate:
    """What must not be timed."""

    def prepared(self):
        return reference_layer("dense", TINY, Planting(TINY, "cpu").step(1.0))

    def test_a_right_step_passes_with_its_ledger(self):
        layer, step = self.prepared()
        passed = check(layer, step, lambda: expected(layer, step))
        assert (passed.rel_error, passed.ledger_error, passed.kept, passed.sparse_steps) == (0.0, 0.0, 1.0, 1.0)
        assert passed.bytes_read == TINY.B * TINY.T * TINY.Hkv * TINY.d * 4

    def test_a_wrong_output_is_refused(self):
        layer, step = self.prepared()
        run(layer, step)
        right = expected(layer, step)
        with pytest.raises(GateError, match="output differs from the reference by"):
            check(layer, step, lambda: Expected(right.out * 1.1, right.counts))

    def test_uninitialised_output_is_refused(self, monkeypatch):
        layer, step = self.prepared()
        run(layer, step)
        right = expected(layer, step)
        monkeypatch.setattr(layer, "step", lambda k, v, q, scale: torch.empty_like(q))
        with pytest.raises(GateError, match="nan"):
            check(layer, step, lambda: right)

    @pytest.mark.parametrize("column", ["union", "selected", "context", "steps"])
    def test_a_wrong_ledger_is_refused(self, column):
        layer, step = self.prepared()
        run(layer, step)
        right = expected(layer, step)
        counts = replace(right.counts, **{column: getattr(right.counts, column) * 1.02})
        with pytest.raises(GateError, match=f"ledger column {column} differs from its recount"):
            check(layer, step, lambda: Expected(right.out, counts))


def test_cold_layers_outgrow_the_cache_and_share_one_reference(monkeypatch):
    monkeypatch.setattr(timing, "cold_bytes", lambda: 5 * TINY.T * TINY.Hkv * TINY.d * 4 - 1)
    method = create("dense")
    make = type(method).new_layer
    monkeypatch.setattr(type(method), "new_layer", lambda m, g, r, _: make(m, g, r, "reference"))
    inputs = [Planting(TINY, "cpu").step(1.0)]
    filled = fill(method, TINY, inputs, cold=True)
    assert len(filled.layers) == filled.calls(hot=False) == 5
    assert (len(filled.expected), filled.calls(hot=True)) == (1, 1)
    assert len({layer.keys.data_ptr() for layer, _ in filled.layers}) == 5
    assert len(fill(method, TINY, inputs, cold=False).layers) == 1
    assert len({step.keys.data_ptr() for step in copies(inputs, 3)}) == 3


def test_the_floor_of_ffd_is_the_fixed_one_and_its_launches_share_it():
    shape, method = Shape(1, 262144), create("ffd")
    passed = passed_with(kept=0.02)
    size, _ = floor_bytes(method, None, shape, passed)
    assert size == pytest.approx(262144 * 8 * (34 + 0.02 * 384))
    assert sum(stage.bytes(shape, 0.02) for stage in stages(method, shape)) == pytest.approx(size)


def test_the_step_says_when_it_quantises_a_block():
    ffd = create("ffd")
    assert whole_step(ffd, Shape(1, 256)) == "append quantise tail threshold scan attend reduce"
    assert whole_step(ffd, Shape(1, 255)) == "append tail threshold scan attend reduce"
    assert whole_step(create("kivi"), Shape(1, 256)) == "append attend reduce"


@pytest.mark.parametrize("values", [True, False])
def test_a_trace_gives_the_last_step_of_each_row_and_all_layers(tmp_path, values):
    lengths = torch.tensor([[40, 20], [41, 21]], dtype=torch.int32)
    layers = {layer: torch.randn(2, 2, 41, 16, dtype=torch.bfloat16) for layer in (0, 3)}
    trace = Trace(
        scale=0.3, keys=layers, values={x: -keys for x, keys in layers.items()} if values else {},
        queries={layer: torch.randn(2, 2, 6, 16, dtype=torch.bfloat16) for layer in layers},
        lengths=lengths, active=torch.tensor([[True, True], [True, False]]),
        prompt_lengths=torch.tensor([39, 19], dtype=torch.int32),
    )  # fmt: skip
    trace.save(tmp_path / "vt-0.safetensors")
    (first, steps), (second, _) = captured(tmp_path / "vt-0.safetensors", "cpu")
    assert first == Shape(1, 41, 6, 2, 16, "bfloat16", "vt-0 row 0")
    assert (second.T, second.trace) == (20, "vt-0 row 1")
    assert [torch.equal(step.q[0], trace.queries[layer][1, 0]) for step, layer in zip(steps, (0, 3), strict=True)]
    assert torch.equal(steps[1].keys[0], layers[3][0, :, :41])
    assert torch.equal(steps[1].values, -steps[1].keys if values else steps[1].keys)
    assert steps[0].scale == 0.3


def test_a_point_without_the_named_method_is_dense_alone():
    assert point(Shape(1, 4096), {"dense": {}}, (0.5,)).entries == ()


def test_an_infinite_margin_is_json_ready():
    assert json.loads(json.dumps(plain({"delta": math.inf, "deltas": None}), allow_nan=False)) == {"delta": "inf"}
