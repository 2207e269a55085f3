"""The kernel runner's parts that need no kernel: grid, planted and captured keys, gate, record, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from eval.fidelity.traces import Trace
from experiments.bench_config import bench_options
from experiments.errors import UsageError
from experiments.kernel import record, timing
from experiments.kernel.baselines import copies
from experiments.kernel.gate import Expected, GateError, check, expected, run
from experiments.kernel.grid import BLOCK, COMPLETING, KEPT, WITH_TAIL, Mode, Shape, entries, point
from experiments.kernel.layers import fill, filled_layer
from experiments.kernel.measure import PointRun, missed_target
from experiments.kernel.merge import merged
from experiments.kernel.rows import Refusal, Row
from experiments.kernel.source import Planting, Step, captured
from experiments.kernel.stages import floor_bytes, stages, whole_step
from experiments.kernel.standard import COMPONENT_KEPT, MAIN_LENGTHS, PARTS, standard
from ffd.methods import Method, create, method_class, method_names
from tests.run_in_process import invoke

TINY = Shape(1, 2000, 4, 2, 32, "float16")
DEFAULTS = {
    "B": None, "T": None, "kept": None, "G": 4, "Hkv": 8, "d": 128, "dtype": "bfloat16", "l2": "cold",
    "timing": "graph", "stages": True, "source": "planted", "traces": None,
}  # fmt: skip


def row(**changes: object) -> Row:
    """A measured row of FFD."""
    base = Row(
        method="ffd", knobs={}, storage="int8 block 128", B=1, T=4032, Hq=32, Hkv=8, d=128, dtype="bfloat16", trace="",
        kept_target=0.18, kept=0.18, source="planted", timing="graph", l2="cold",
        step=["append", "tail", "threshold", "scan", "attend", "reduce"], time_us=10.0, bytes=1e6, bytes_rule="",
        floor_us=1.0, efficiency=0.1, sdpa_flash_us=20.0, best_dense_us=15.0, rel_error=0.002, ledger_error=0.0,
        sparse_steps=1.0,
    )  # fmt: skip
    return replace(base, **changes)


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


def test_budgets_become_tokens_and_other_methods_keep_their_knobs():
    shape, tail = Shape(1, 10000), 10000 % BLOCK
    (quest,) = entries("quest", {"token_budget": 7000}, shape, (0.2,))
    (topk,) = entries("topk", {"keep_fraction": 0.9}, shape, (0.2,))
    (window,) = entries("streaming", {}, shape, (0.2,))
    (ffd,) = entries("ffd", {"delta": 3.0}, shape, (0.2,))
    whole = 15 * BLOCK + tail  # the hot tokens of the heads that have the fewest
    assert (quest.method.token_budget, topk.method.token_budget, topk.method.keep_fraction) == (whole, whole, None)
    assert (window.method.window, ffd.method.delta) == (2000, 3.0)
    (everything,) = entries("topk", {}, shape, (1.0,))
    assert everything.method.token_budget >= shape.T


def test_a_base_selection_has_room_for_the_target():
    small, large = Shape(1, 16320), Shape(1, 262080)
    budgets = [e.method.token_budget for shape in (small, large) for e in entries("twilight", {}, shape, (0.18, 1.0))]
    assert budgets[0] == create("twilight").token_budget
    assert all(budget >= 0.18 * large.T for budget in budgets[2:])
    assert all(budget >= T for budget, T in zip(budgets[1::2], (small.T, large.T), strict=True))


def test_what_reads_everything_has_one_entry_and_too_small_targets_have_none():
    assert [e.kept for e in entries("kivi", {}, Shape(1, 10000), (0.02, 0.5))] == [1.0]
    assert [e.kept for e in entries("ffd", {}, Shape(1, 4096), (0.02, 0.05, 0.18))] == [0.18]
    assert [e.kept for e in entries("topp", {}, Shape(1, 4096), (None,))] == [None]


@pytest.fixture(scope="module")
def grid():
    """Points of the committed record."""
    return [p for part in PARTS for p in standard(part)]


def test_the_standard_grid_covers_what_the_record_promises(grid):
    lengths = {p.shape.T for p in grid}
    assert any(T % BLOCK == 0 for T in lengths)
    assert any(T % BLOCK for T in lengths)
    assert max(lengths) == 262144
    assert {p.shape.Hq // p.shape.Hkv for p in grid} >= {1, 4, 7, 8}
    assert {p.shape.d for p in grid} == {64, 128}
    assert {p.shape.dtype for p in grid} == {"bfloat16", "float16"}
    assert {p.shape.B for p in grid} == {1, 8}
    assert {m for p in grid for m in p.modes} >= {Mode("eager", "cold"), Mode("graph", "hot")}
    assert {e.kept for p in grid for e in p.entries} == {0.02, 0.05, 0.18, 0.27, 0.273, 1.0}


@pytest.mark.parametrize("name", sorted(set(method_names()) - {"dense"}))
def test_every_registered_method_is_timed_at_every_length_and_share_that_it_can_have(grid, name):
    def shares(batch: int, tokens: int) -> set[float | None]:
        points = [p for p in grid if p.shape == Shape(batch, tokens)]
        return {e.kept for p in points for e in p.entries if e.method.name == name}

    if name == "component":  # an ablation at one share: the paper's
        assert all(shares(1, T) == {COMPONENT_KEPT} for T in WITH_TAIL)
        return
    for T in WITH_TAIL:
        asked = {1.0} if method_class(name).reads_everything else {k for k in KEPT if k * T >= 2 * BLOCK}
        assert shares(1, T) >= asked
    for T in MAIN_LENGTHS:
        assert shares(8, T) >= ({1.0} if method_class(name).reads_everything else {0.02, 0.18, 1.0})
    assert all(shares(1, T) for T in COMPLETING)


def test_a_point_takes_one_kept_share_after_the_other(grid):
    shares = [[e.kept for e in p.entries] for p in grid]
    assert shares == [sorted(own) for own in shares]


def test_keys_are_planted_once_for_all_methods_at_a_share():
    planting = Planting(TINY, "cpu")
    first = planting.step(0.5)
    assert planting.step(0.5) is first
    assert not torch.equal(planting.step(1.0).keys, first.keys)


SELECTING = sorted(
    name for name in set(method_names()) - {"dense", "component"} if not method_class(name).reads_everything
)


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize(("length", "kept"), [(8128, 0.05), (8192, 0.18), (8128, 1.0)])
def test_every_method_keeps_the_target_whatever_its_rule(name, length, kept):
    # A budget beyond a head's hot tokens went to cold ones, others for each query head: 2 % became 3.
    shape = Shape(1, length, 16, 4, 64, "float16")
    (entry,) = entries(name, {}, shape, (kept,))
    layer, step = reference_layer(name, shape, Planting(shape, "cpu").step(kept), entry.method)
    run(layer, step)
    counts = layer.ledger.counts()
    found = float((counts.union / counts.context).mean())
    assert found == pytest.approx(kept, abs=BLOCK / length / 4 + 0.01 * kept)
    assert missed_target(entry, shape, found) is None


def test_a_share_that_a_method_does_not_keep_is_no_row_of_that_name():
    (entry,) = entries("ffd", {"delta": 14.0}, Shape(1, 65472), (0.18,))
    assert missed_target(entry, Shape(1, 65472), 1.0) == (
        "keeps 1.000 of the tokens with these keys and knobs, expected 0.18"
    )
    assert missed_target(entry, Shape(1, 65472), 0.195) is None
    (captured_keys,) = entries("ffd", {}, Shape(1, 65472), (None,))
    assert missed_target(captured_keys, Shape(1, 65472), 1.0) is None


def test_such_a_share_is_refused_with_what_was_kept(monkeypatch):
    shape = Shape(1, 65472)
    filled = SimpleNamespace(passed=check_of(kept=0.04))
    monkeypatch.setattr(PointRun, "_fill", lambda *_: filled)
    monkeypatch.setattr(PointRun, "_timed", lambda *_: pytest.fail("timed"))
    dense = row(method="dense", kept_target=1.0, T=shape.T, step=whole_step(create("dense"), shape).split())
    (item,) = PointRun(point(shape, {"twilight": {}}, (0.18,)), 1.0, "cpu", done={dense.label: dense}).rows()
    assert (item.label, item.wrong) == (f"twilight kept=0.18 {shape.label}", False)
    assert item.reason.startswith("keeps 0.040 of the tokens")


@pytest.mark.parametrize("kept", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("length", [2000, 2048])
def test_planted_keys_make_ffd_keep_the_target(kept, length):
    shape = replace(TINY, T=length, B=2)
    layer, step = reference_layer("ffd", shape, Planting(shape, "cpu").step(kept))
    run(layer, step)
    counts = layer.ledger.counts()
    assert float((counts.union / counts.context).mean()) == pytest.approx(kept, abs=BLOCK / length / 4 + 1e-9)


def test_planted_blocks_differ_by_at_most_one_between_kv_heads():
    shape = replace(TINY, T=8192, B=2)
    layer, step = reference_layer("ffd", shape, Planting(shape, "cpu").step(0.13))
    run(layer, step)
    union = layer.ledger.counts().union
    assert union.max() - union.min() <= BLOCK


def reference_layer(name: str, shape: Shape, step: Step, method: Method | None = None):
    """Filled as the runner does, for the executor that needs no kernel."""
    from unittest import mock

    method = method or create(name)
    make = type(method).new_layer
    with mock.patch.object(type(method), "new_layer", lambda m, g, r, _: make(m, g, r, "reference")):
        return filled_layer(method, shape, step), step


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
    passed = check_of(kept=0.02)
    size, _ = floor_bytes(method, None, shape, passed)
    assert size == pytest.approx(262144 * 8 * (34 + 0.02 * 384))
    assert sum(stage.bytes(shape, 0.02) for stage in stages(method)) == pytest.approx(size)


def check_of(kept: float):
    from experiments.kernel.gate import Passed

    return Passed(0.0, 0.0, kept, 0.0, 1.0)


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


class TestRecord:
    """What rows say together."""

    def test_slopes_are_fitted_per_method_and_kept_fraction(self):
        rows = [row(T=T, time_us=3 + T / 500) for T in (1000, 2000, 4000)]
        rows += [row(T=T, time_us=99.0, timing="eager") for T in (1000, 2000, 4000)]
        rows += [row(T=T, kept_target=0.02) for T in (1000, 2000)]
        assert record.slopes(rows) == {"ffd kept 0.18": 2.0}

    def test_the_guard_against_regret_looks_at_rows_that_keep_everything(self):
        kept = row(kept_target=1.0, kept=1.0)
        assert record.regret_guard([row(), kept])["holds"]
        assert record.regret_guard([kept])["time_over_best_dense"] == [{"B": 1, "T": 4032, "kept": 1.0, "ratio": 0.667}]
        for broken in (replace(kept, kept=0.99), replace(kept, sparse_steps=0.0)):
            assert not record.regret_guard([broken])["holds"]
            assert "keep = 1" in record.problem([broken], [])

    def test_a_refusal_of_the_gate_is_a_problem_and_an_absent_baseline_is_none(self):
        absent = Refusal("flashinfer B=1", "not installed", wrong=False)
        assert record.problem([row()], [absent]) is None
        assert "ffd B=1: output differs" in record.problem(
            [row()], [absent, Refusal("ffd B=1", "output differs", True)]
        )

    def test_the_record_has_the_fields_that_the_issue_lists(self):
        made = record.record([row()], [], 4.5e6, {"gpu": "g", "versions": {}, "revision": "r"})
        assert {"gpu", "versions", "revision", "date", "rows", "gate", "slopes_us_per_1000_tokens"} <= made.keys()
        fields = {
            "method", "storage", "B", "T", "Hq", "Hkv", "d", "dtype", "kept_target", "kept", "source", "timing", "l2",
            "step", "time_us", "bytes", "floor_us", "efficiency", "sdpa_flash_us", "best_dense_us", "rel_error",
        }  # fmt: skip
        assert fields <= made["rows"][0].keys()
        assert Row.from_dict(json.loads(json.dumps(made))["rows"][0]) == row()

    def test_labels_tell_apart_all_that_is_timed(self):
        rows = [row(), row(T=1), row(kept_target=0.5), row(timing="eager"), row(l2="hot"), row(trace="a row 0"),
                row(step=["reduce"]), row(method="quest"), row(dtype="float16")]  # fmt: skip
        assert len({r.label for r in rows}) == len(rows)


class TestMerge:
    """Records of several processes as one."""

    def stored(self, path: Path, rows: list[Row], roof: float) -> Path:
        refused = [Refusal("flashinfer B=1", "not installed", wrong=False)]
        machine = {"gpu": "g", "versions": {"torch": "2"}, "revision": "r"}
        path.write_text(json.dumps(record.record(rows, refused, roof, machine)))
        return path

    def test_rows_keep_the_baselines_of_their_process_and_slopes_take_the_first(self, tmp_path):
        a = self.stored(tmp_path / "a.json", [row(T=T, time_us=T / 500) for T in (1000, 2000, 4000)], 4e6)
        b = self.stored(tmp_path / "b.json", [row(T=1000, time_us=50.0, best_dense_us=9.0), row(method="quest")], 5e6)
        made = merged([a, b])
        assert [r["best_dense_us"] for r in made["rows"]] == [15.0, 15.0, 15.0, 9.0, 15.0]
        assert made["slopes_us_per_1000_tokens"] == {"ffd kept 0.18": 2.0}
        assert (made["read_bandwidth_bytes_per_us"], len(made["refused"])) == (4e6, 1)
        assert "2 processes (read bandwidth 4000000, 5000000 bytes per us)" in made["note"]
        assert merged([self.stored(tmp_path / "c.json", [row()], 4e6)])["rows"] == [row().as_dict()]

    def test_what_was_wrong_stays_wrong(self, tmp_path):
        a = self.stored(tmp_path / "a.json", [row()], 4e6)
        stored = json.loads(a.read_text())
        stored["refused"].append(Refusal("ffd B=8", "output differs", wrong=True).as_dict())
        a.write_text(json.dumps(stored))
        assert merged([a])["gate"]["wrong"][0]["refused"] == "ffd B=8"

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"revision": "s"}, "its revision is s; expected r, the first's"),
            ({"gpu": "h"}, "its gpu is h; expected g"),
            ({"rows": None}, "expected a record with rows and refused"),
            ({"rows": [{"method": "ffd"}]}, "its rows are of another version"),
            ({"date": None}, None),
        ],
    )
    def test_records_of_other_machines_or_kinds_are_refused(self, tmp_path, changes, said):
        a, b = (self.stored(tmp_path / name, [row()], 4e6) for name in ("a.json", "b.json"))
        stored = {**json.loads(b.read_text()), **changes}
        b.write_text(json.dumps({k: v for k, v in stored.items() if v is not None}))
        with pytest.raises(UsageError, match=said or "expected a record with gpu, versions") as error:
            merged([a, b])
        assert f"--merge={b}" in str(error.value)
        with pytest.raises(UsageError, match="expected a record"):
            merged([a, tmp_path / "absent.json"])


def test_a_point_without_the_named_method_is_dense_alone():
    assert point(Shape(1, 4096), {"dense": {}}, (0.5,)).entries == ()


def test_an_infinite_margin_is_json_ready():
    from experiments.kernel.measure import plain

    assert json.loads(json.dumps(plain({"delta": math.inf, "deltas": None}), allow_nan=False)) == {"delta": "inf"}
