"""runner=throughput: what its rows say, how the kept fraction is set, and how a run is resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from analysis.load import load
from analysis.tables import build_tables
from experiments.key_figures import key_figures
from experiments.throughput import demanded, engine_row
from experiments.throughput import measure as measuring
from experiments.throughput.__main__ import main
from experiments.throughput.bench import Bench
from experiments.throughput.cases import FAIR, Case, Grid, cases
from experiments.throughput.margins import set_kept
from experiments.throughput.measure import measure
from experiments.throughput.models import random_model
from experiments.throughput.row import kv_bytes, weight_bytes
from experiments.throughput.steps import WINDOW, Steps, stored_bytes
from experiments.throughput.summary import break_even
from ffd.methods import create
from ffd.support import SettingError
from tests.run_in_process import invoke, only_run

TOKENS = 512
NO_FUSION = "engine.fuse=true: device cpu: kernels need a GPU; expected auto or false"
FFD_64 = create("ffd", {"block_size": 64})
ARGUMENTS = ["runner=throughput", "bench.geometry=toy", "tracker=none", "bench.T=[256,512]", "method.block_size=64"]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(random_model("toy", "cpu", "float32"), "cpu", bandwidth=1e10)


def case_of(method: Any, **changes: Any) -> Case:
    kept = 1.0 if method.name == "dense" else None
    return replace(Case(FAIR, method, 1, TOKENS, kept), **changes)


def row_of(bench: Bench, case: Case) -> dict[str, Any]:
    (row,) = measure(bench, [case])
    return row


def steps_of(bench: Bench, case: Case) -> Steps:
    with torch.inference_mode():
        steps = Steps(engine_row.make_engine(bench, case), case.T)
        steps.fill()
    return steps


@pytest.mark.parametrize("kept", [0.18, 0.5])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_kept_fraction_is_the_one_asked_for_and_stays_so(bench, kept, batch):
    case = case_of(FFD_64, T=1024, B=batch, kept=kept)
    with torch.inference_mode():
        steps = steps_of(bench, case)
        set_kept(steps, kept)
        for _ in range(2):
            steps.time(2)
            assert steps.kept() == pytest.approx(kept, abs=0.01)


def test_every_window_repeats_the_same_steps(bench):
    with torch.inference_mode():
        steps = steps_of(bench, case_of(create("topk", {"token_budget": 64})))
        counted = []
        for _ in range(2):
            steps.clear()
            steps.window()
            counted.append(torch.stack([storage.ledger.counters for storage in steps.storages]))
            steps.engine._state.token.fill_(7)  # what a window leaves behind must not matter
    assert torch.equal(*counted)
    assert int(counted[0][..., 0].min()) == WINDOW


def test_rows_that_end_for_want_of_a_prediction_are_timed_all_the_same():
    """Random keys may be more than a model of 16 bits can take. Once nothing was counted then: a division by zero."""
    model = random_model("toy", "cpu", "float32")
    model.lm_head.weight.data[9] = torch.nan
    row = row_of(Bench(model, "cpu", bandwidth=1e10), case_of(create("dense")))
    assert row["bytes"] == pytest.approx(weight_bytes(model) + (TOKENS + 1) * kv_bytes(model))


def test_the_floor_counts_weights_and_what_the_method_must_read(bench):
    layers, heads, d = 2, 2, 16
    context = TOKENS + (WINDOW + 1) / 2
    dense = row_of(bench, case_of(create("dense")))
    assert dense["bytes"] == pytest.approx(weight_bytes(bench.model) + context * kv_bytes(bench.model))
    assert dense["floor_ms"] == pytest.approx(1e3 * dense["bytes"] / 1e10)
    assert dense["over_floor"] == pytest.approx(dense["ms_per_step"] / dense["floor_ms"])
    ffd = row_of(bench, case_of(FFD_64, kept=0.5))
    tail = (WINDOW + 1) / 2
    kept_blocks = ffd["kept"] * context - tail
    per_head = TOKENS * (d / 4 + 2 * d / 64) + kept_blocks * 5 * d + tail * 8 * d
    assert ffd["bytes"] == pytest.approx(weight_bytes(bench.model) + layers * heads * per_head, rel=1e-3)


def test_memory_per_token_is_that_of_the_allocated_storage(bench):
    dense = row_of(bench, case_of(create("dense")))
    assert dense["kv_bytes_per_token"] == dense["dense_kv_bytes_per_token"] == kv_bytes(bench.model)
    ffd, quest = (row_of(bench, case_of(m)) for m in (FFD_64, create("quest", {"skip_layers": 0})))
    assert ffd["kv_bytes_per_token"] < kv_bytes(bench.model) < quest["kv_bytes_per_token"]  # quest: page bounds besides
    storage = steps_of(bench, case_of(FFD_64)).storages[0]
    blocks = 9  # 512 tokens and a window in blocks of 64
    expected = 2 * (blocks * 64 * (16 // 4 + 16 + 4 * 16) + blocks * 2 * 16 + 64 * 4 * 16)
    assert stored_bytes(storage) == expected + 4 * 4  # and a margin per query head


def test_prefill_is_timed_apart_from_storing(bench):
    row = row_of(bench, case_of(FFD_64, prefill=True))
    assert row["ttft_ms"] >= row["prefill_ms"] > row["store_ms"] > 0
    assert row_of(bench, case_of(FFD_64))["prefill_ms"] is None


@pytest.mark.parametrize("protocol", ["paper-default", "paper-flash"])
def test_transformers_own_loop(bench, protocol):
    row = row_of(bench, case_of(create("dense"), protocol=protocol, B=2))
    assert (row["protocol"], row["timing"], row["kept"]) == (protocol, "eager", 1.0)
    assert row["bytes"] == weight_bytes(bench.model) + 2 * TOKENS * kv_bytes(bench.model)
    assert row["tokens_per_second"] == pytest.approx(2e3 / row["ms_per_step"])


def test_the_papers_captures_are_spread_over_a_block():
    class Replayed:
        captured = True

        def time(self, windows: int, *, eager: bool) -> float:
            return 40.0

        def capture_anew(self) -> float:
            return 138.0

    found = engine_row._ablation(Replayed(), 10.0, case_of(create("ffd")))  # type: ignore[arg-type]
    assert found == {
        "eager": 40.0,
        "one_graph": 10.0,
        "recaptured": 11.0,
        "capture": 128.0,
        "steps_per_capture": 128,
    }
    assert engine_row._ablation(Replayed(), 10.0, case_of(create("quest"))) is None  # type: ignore[arg-type]


def test_a_grid_times_dense_once_and_transformers_where_asked():
    grid = Grid(points=((1, 8192), (1, 65536), (8, 4096)), kept=(0.1, 0.2), transformers_points=((8, 4096),))
    planned = list(cases(grid, [create("dense"), create("ffd"), create("quest")]))
    at = [c.name for c in planned if (c.B, c.T) == (8, 4096)]
    assert at == [
        "fair dense", "fair ffd kept 0.1", "fair ffd kept 0.2", "fair quest",
        "paper-default dense", "paper-flash dense",
    ]  # fmt: skip
    assert sum(c.protocol != FAIR for c in planned) == 2
    assert {(c.method.name, c.kept, c.T) for c in planned if c.ablation} == {("ffd", 0.1, 8192), ("quest", None, 8192)}
    assert not any(c.prefill for c in planned if c.B > 1)


def curve(method: str, times: dict[int, float], along: str = "T") -> list[dict[str, Any]]:
    fixed = {"B": 1, "T": 4096, "fuse": "auto", "protocol": FAIR, "method": method, "kept_target": 0.18}
    return [{**fixed, along: value, "ms_per_step": ms} for value, ms in times.items()]


@pytest.mark.parametrize(
    ("times", "at", "says"),
    [
        ({10: 1.0, 20: 2.0, 40: 3.0}, "always", "always"),
        ({10: 9.0, 20: 9.0, 40: 9.0}, "never", "never"),
        ({10: 3.0, 20: 4.0, 40: 3.0}, 30.0, "from T = 30 on"),
        ({10: 1.0, 20: 5.0, 40: 3.0}, 20 + 20 * 2 / 3, "from T = 33 on"),
    ],
)
def test_break_even(times, at, says):
    rows = curve("dense", {10: 2.0, 20: 3.0, 40: 4.0}) + curve("ffd", times) + [{**curve("ffd", {80: 0})[0]}]
    del rows[-1]["ms_per_step"]  # a point that did not fit the GPU
    (found,) = break_even(rows)
    assert found["at"] == pytest.approx(at) if isinstance(at, float) else found["at"] == at
    assert says in found["says"]
    assert (found["fixed"], found["measured"]) == ({"B": 1}, [10, 20, 40])


def test_break_even_along_the_batch():
    rows = curve("dense", {1: 2.0, 8: 6.0}, "B") + curve("ffd", {1: 3.0, 8: 5.0}, "B")
    (found,) = break_even(rows)
    assert (found["along"], found["at"], found["fixed"]) == ("B", pytest.approx(4.5), {"T": 4096})


def run(arguments, monkeypatch, tmp_path) -> tuple[int, dict[str, Any]]:
    code = invoke([*ARGUMENTS, *arguments, f"out={tmp_path / 'out'}"], monkeypatch)
    return code, json.loads((only_run(tmp_path) / "summary.json").read_text())


def test_an_interrupted_run_keeps_its_rows_and_resumes(monkeypatch, tmp_path):
    measured, real = [], engine_row.engine_row

    def interrupted(bench: Bench, case: Case) -> Any:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(case.label)
        return real(bench, case)

    monkeypatch.setattr(measuring, "engine_row", interrupted)
    code, summary = run([], monkeypatch, tmp_path)
    assert (code, summary["status"], len(summary["rows"])) == (130, "partial", 2)
    monkeypatch.setattr(measuring, "engine_row", lambda bench, case: measured.append(case.label) or real(bench, case))
    code, resumed = run([], monkeypatch, tmp_path)
    assert (code, resumed["status"]) == (0, "complete")
    assert resumed["rows"][:2] == summary["rows"]
    assert [(r["method"], r["T"]) for r in resumed["rows"]] == [
        ("dense", 256),
        ("ffd", 256),
        ("dense", 512),
        ("ffd", 512),
    ]
    assert len(measured) == 4
    assert {row["device"] for row in resumed["rows"]} == {"cpu"}
    assert [found["along"] for found in resumed["break_even"]] == ["T"]
    shown = key_figures(resumed)
    assert (shown["rows"], shown["at"], shown["kept"]) == ("4", "B=1 T=512", f"{resumed['rows'][3]['kept']:.3f}")
    assert shown["tok/s"] == f"{resumed['rows'][3]['tokens_per_second']:.1f}"
    assert run([], monkeypatch, tmp_path)[0] == 0  # shown, not measured
    assert len(measured) == 4
    tables = {table.name: table for table in build_tables(load(tmp_path / "out"))}
    labels = [label for label, _ in tables["throughput"].rows]
    assert any("NVIDIA H200" in label for label in labels)  # the committed record stays beside a CPU's times
    assert "B=1 T=512 fair ffd kept 18 % (cpu)" in labels
    assert resumed["break_even"][0]["says"] in tables["throughput"].notes
    assert "B=1 T=512 fair ffd kept 18 % (cpu)" in dict(tables["prefill"].rows)


def test_a_point_that_does_not_fit_is_said_so(monkeypatch, tmp_path, capsys):
    real = engine_row.engine_row

    def small(bench: Bench, case: Case) -> Any:
        if case.T == 512:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return real(bench, case)

    monkeypatch.setattr(measuring, "engine_row", small)
    code, summary = run([], monkeypatch, tmp_path)
    assert (code, summary["status"]) == (0, "complete")
    assert [row.get("problem") for row in summary["rows"]] == [None, None, *["CUDA out of memory."] * 2]
    assert "fair ffd B=1 T=512: not measured: CUDA out of memory." in capsys.readouterr().out


def test_one_key_times_the_engine_with_and_without_its_fused_kernels(monkeypatch, tmp_path):
    code, summary = run(["engine.fuse=[auto,false,auto]", "bench.T=256"], monkeypatch, tmp_path)
    assert code == 0
    assert [(row["method"], row["fuse"]) for row in summary["rows"]] == [
        ("dense", "auto"),
        ("ffd", "auto"),
        ("dense", "false"),
        ("ffd", "false"),
    ]


def test_a_demand_that_cannot_be_met_is_refused_before_the_first_row(monkeypatch, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("says what is refused without a GPU")
    arguments = [*ARGUMENTS, "engine.fuse=[auto,true,false]", "bench.T=256", f"out={tmp_path}"]
    assert invoke(arguments, monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.err == f"error: {NO_FUSION}\n"  # was: fuse=True: all: device cpu ...
    assert not list(tmp_path.rglob("samples.jsonl"))  # two of six rows were timed, and false was never
    assert "fair dense" not in printed.out


def test_each_demand_of_a_grid_is_looked_at(bench, monkeypatch):
    monkeypatch.setattr("ffd.fusion.without_gpu", lambda device: None)
    one, many = (list(cases(Grid([(b, 256)], fuse=("auto", "true")), [])) for b in (1, 17))
    demanded.require_fusable(one, "cpu", "bfloat16")
    with pytest.raises(SettingError, match=r"^fuse=True: 17 tokens a step: kernels are for at most 16; expected auto"):
        demanded.require_fusable([*one, *many], "cpu", "bfloat16")
    with pytest.raises(SettingError, match=r"^fuse=True: dtype torch.float32: kernels are for 16-bit weights; "):
        demanded.require_fusable(one, "cpu", "float32")
    demanded.require_fusable([case for case in many if case.fuse == "auto"], "cpu", "float32")
    asked: list[tuple[object, int]] = []
    monkeypatch.setattr(demanded, "resolve_fusion", lambda requested, model, rows: asked.append((requested, rows)))
    demanded.require_fused([*many, *one], bench)
    assert asked == [(True, 1), (True, 17)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench.geometry=huge"], "bench.geometry=huge: expected one of llama31_8b, toy"),
        (["bench.geometry=llama31_8b"], "bench.geometry=llama31_8b: needs a GPU; expected null or toy"),
        (["model.path=somewhere"], "bench.geometry=toy: expected null where model.path is given"),
        (["bench.protocols=[paper-flash]"], "bench.protocols=paper-flash: expected fair too, without a GPU"),
        (["bench.protocols=[fast]"], "bench.protocols=fast: expected one of fair, paper-default, paper-flash"),
        (["engine.fuse=[auto,maybe]"], "engine.fuse=maybe: expected auto, true or false"),
        (["engine.fuse=[]"], "engine.fuse=[]: expected auto, true or false, or a list of them"),
        (["bench.fuse=[auto,false]"], "bench.fuse=[auto,false]: bench.fuse is called engine.fuse now"),
        (["+bench.fuse=[auto,false]"], "bench.fuse=[auto,false]: bench.fuse is called engine.fuse now"),
        (["engine.fuse=true"], f"error: {NO_FUSION}\n"),
        (["engine.fuse=true", "dry_run=true"], f"error: {NO_FUSION}\n"),  # was planned
        (["engine.graph=true", "dry_run=true"], "error: engine.graph=true: device cpu has no CUDA graphs; expected"),
        (["model.dtype=int8"], "model.dtype=int8: expected one of auto, float32"),  # was a failed run
        (["+bench.extra=1"], "bench.extra=1: no such key; expected one of B, T"),  # was passed over
        (["match.keep_io=0.2"], "match.keep_io=0.2: expected null with runner=throughput"),
    ],
)
def test_refusals(arguments, message, monkeypatch, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("says what is refused without a GPU")
    assert invoke([*ARGUMENTS, *arguments, f"out={tmp_path}"], monkeypatch) == 2
    assert message in capsys.readouterr().err


def test_the_bare_command_writes_a_record(tmp_path, capsys):
    path = tmp_path / "record.json"
    arguments = ["--geometry", "toy", "--grid", "1x256", "1x512", "--methods", "ffd", "--kept", "0.5"]
    assert main(["--out", str(path), *arguments, "--revision", "abc"]) == 0
    record = json.loads(path.read_text())
    assert record["revision"] == "abc"
    assert record.keys() >= {"gpu", "versions", "date", "read_bandwidth", "model", "break_even"}
    assert len(record["rows"]) == 4
    assert record["break_even"][0]["says"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "0x512"], "--grid: 0x512: expected BxT with both at least 1"),
        (["--grid", "1x-5"], "--grid: 1x-5: expected BxT"),
        (["--grid", "1x256", "--kept", "nan"], "--kept: nan: expected a number in (0, 1]"),  # was timed, and recorded
        (["--grid", "1x256", "--kept", "1.5"], "--kept: 1.5: expected a number in (0, 1]"),
        (["--grid", "1x256", "--prefill-tokens", "-4"], "--prefill-tokens: -4: expected an integer >= 0"),
        (["--grid", "1x256", "--geometry", "llama31_8b"], "--geometry=llama31_8b: needs a GPU"),  # ate all memory
        (["--grid", "1x256", "--fuse", "auto", "true"], "error: --fuse=true: device cpu: kernels need a GPU; expected"),
        (["--grid", "1x256", "--methods", "kivi"], "group_size=32: expected a divisor of head_dim=16; 1 rows are in"),
    ],
)
def test_the_bare_command_refuses_in_one_line(arguments, message, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("says what is refused without a GPU")
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "new" / "record.json"), "--geometry", "toy", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_bare_command_replaces_no_record(tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text("hours of measuring")
    for out in (path, tmp_path, path / "below"):
        with pytest.raises(SystemExit):
            main(["--out", str(out), "--geometry", "toy", "--grid", "1x256"])
    assert path.read_text() == "hours of measuring"
    said = capsys.readouterr().err
    assert "record.json: exists already; expected a new file" in said
    assert "expected a file, not a folder" in said
    assert "cannot be written" in said


def test_the_bare_command_needs_torch_and_transformers_only():
    script = (
        "import sys, experiments.throughput.__main__; "
        "print(sorted({'hydra', 'omegaconf', 'wandb', 'rich', 'eval', 'analysis'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
