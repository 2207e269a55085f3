"""`python run.py` end to end on a tiny random model: what a run leaves, how it resumes, how it fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import run
from experiments import accuracy
from experiments.store import RunStore
from tests.ruler_tokenizer import build
from tests.run_in_process import invoke, only_run
from tests.tiny import tiny_model

ROOT = Path(run.__file__).parent
SAMPLE_KEYS = [
    "task",
    "index",
    "prompt_fingerprint",
    "bos_count",
    "truncated",
    "prediction",
    "references",
    "score",
    "prompt_tokens",
    "new_tokens",
    "seconds",
    "ledger",
]
LAYERS = 2


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_model("llama", layers=LAYERS).save_pretrained(folder)
    build().save_pretrained(folder)
    return folder


@pytest.fixture
def command(model_folder, tmp_path):
    """Arguments of a small run whose results go to a fresh folder."""
    return [
        f"model.path={model_folder}",
        "task.length=512",
        "task.tasks=[niah_single_1,niah_multikey_2]",
        "task.samples=2",
        "tracker=none",
        "delta=1",
        f"out={tmp_path}/out",
    ]


def samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def comparable(rows):
    """Rows without what differs from run to run by nature."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "timing")} for row in rows]


def test_a_run_leaves_what_it_promises(command, tmp_path, monkeypatch, capsys):
    assert invoke(command, monkeypatch) == 0
    folder = only_run(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    rows = samples(folder)
    assert [(r["task"], r["index"]) for r in rows] == [
        (t, i) for t in ("niah_single_1", "niah_multikey_2") for i in range(2)
    ]
    for row in rows:
        assert set(SAMPLE_KEYS) <= set(row)
        assert row["bos_count"] == 1
        assert row["truncated"] is False
    steps = sum(r["new_tokens"] - 1 for r in rows) * LAYERS
    assert summary["status"] == "complete"
    assert summary["validity"]["sparse_steps"] == steps
    assert summary["validity"]["dense_steps"] == 0
    assert summary["validity"]["executor"] == "reference"
    assert 0 < summary["sparsity"]["keep_io"] <= 1
    assert all(name in summary["counted"] for name in ("tail", "sinks", "layers dense", "prefill"))
    assert summary["sparsity"]["sparsity"] == 1 - summary["sparsity"]["keep_io"]
    assert 0 < summary["fidelity"]["mass_recall"] <= 1
    for block in ("run_id", "method", "model", "task", "timing", "environment", "null_reasons"):
        assert block in summary
    accuracy_block = summary["accuracy"]
    assert set(accuracy_block["niah_multikey_2"]) >= {"score", "n", "ci95", "length_tokens"}
    assert accuracy_block["niah_multikey_2"]["length_tokens"]["max"] <= 512
    assert accuracy_block["average_partial"] is True or accuracy_block["average"] is not None
    for name in ("config.yaml", "environment.json", "layers.json", "fidelity.csv"):
        assert (folder / name).stat().st_size > 0
    out = capsys.readouterr().out
    assert "niah_single_1" in out
    assert "status complete" in out
    assert not (folder / ".reserve").exists()


def test_a_finished_run_is_shown_and_rerun_keeps_the_earlier_files(command, tmp_path, monkeypatch, capsys):
    assert invoke(command, monkeypatch) == 0
    first = (only_run(tmp_path) / "samples.jsonl").read_text()
    capsys.readouterr()
    monkeypatch.setattr(accuracy, "load_model", lambda *_: pytest.fail("a finished run must not load weights"))
    assert invoke(command, monkeypatch) == 0
    assert "status complete" in capsys.readouterr().out
    monkeypatch.undo()
    assert invoke([*command, "rerun=true"], monkeypatch) == 0
    folder = only_run(tmp_path)
    assert (folder / "previous" / "samples.jsonl").read_text() == first
    assert comparable(samples(folder)) == comparable(samples(folder / "previous"))


def test_an_error_keeps_finished_samples_and_the_same_command_resumes(command, tmp_path, monkeypatch, capsys):
    undisturbed = [a for a in command if not a.startswith("out=")] + [f"out={tmp_path}/calm"]
    assert invoke(undisturbed, monkeypatch) == 0
    honest = accuracy.AccuracyRun._run_sample
    calls = []

    def failing(self, engine, loaded, sample, fidelity):
        calls.append(sample.index)
        if len(calls) == 3:
            raise RuntimeError("the power went out")
        return honest(self, engine, loaded, sample, fidelity)

    monkeypatch.setattr(accuracy.AccuracyRun, "_run_sample", failing)
    assert invoke(command, monkeypatch) == 1
    assert "the power went out" in capsys.readouterr().err
    folder = only_run(tmp_path)
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert len(samples(folder)) == 2
    monkeypatch.undo()
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"task": "vt", "index": 0, "predic')  # as a kill in the middle of a write leaves it
    assert invoke(command, monkeypatch) == 0
    (calm,) = (tmp_path / "calm" / "runs").iterdir()
    assert comparable(samples(folder)) == comparable(samples(calm))
    summaries = [json.loads((f / "summary.json").read_text()) for f in (folder, calm)]
    for block in ("accuracy", "sparsity", "validity", "status"):
        assert summaries[0][block] == summaries[1][block]
    numbers = [{k: v for k, v in s["fidelity"].items() if isinstance(v, float)} for s in summaries]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-12)


def test_a_full_disk_marks_the_run_failed_and_leaves_it_readable(command, tmp_path, monkeypatch, capsys):
    honest = RunStore.append_sample

    def full_after_one(self, row):
        if self.finished_samples():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        honest(self, row)

    monkeypatch.setattr(RunStore, "append_sample", full_after_one)
    assert invoke(command, monkeypatch) == 1
    assert "No space left on device" in capsys.readouterr().err
    folder = only_run(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "No space left" in summary["reason"]
    assert len(samples(folder)) == 1


def test_a_really_full_file_system(command, tmp_path, monkeypatch, capsys):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        # What is left holds the ballast, the run's small files and a few samples.
        (small / "filler").write_bytes(b"\0" * 560 * 1024)
        arguments = [a for a in command if not a.startswith(("out=", "task.samples"))]
        assert invoke([*arguments, "task.samples=40", f"out={small}/out"], monkeypatch) == 1
        assert "No space left on device" in capsys.readouterr().err
        (folder,) = (small / "out" / "runs").iterdir()
        assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
        assert samples(folder)
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_resumes(command, tmp_path, monkeypatch, how):
    arguments = [a.replace("task.samples=2", "task.samples=6") for a in command]
    process = subprocess.Popen(
        [sys.executable, "run.py", *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        # A test run started in the background ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    path = tmp_path / "out" / "runs"
    deadline = time.monotonic() + 120
    while not any(p.stat().st_size for p in path.glob("*/samples.jsonl")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "Traceback" not in err
    folder = only_run(tmp_path)
    before = samples(folder)
    assert json.loads((folder / "summary.json").read_text())["status"] == "partial"
    assert invoke(arguments, monkeypatch) == 0
    after = samples(folder)
    assert after[: len(before)] == before
    assert len({(r["task"], r["index"]) for r in after}) == len(after) == 12


def test_looking_at_a_run_never_removes_anything(command, tmp_path, monkeypatch):
    assert invoke(command, monkeypatch) == 0
    folder = only_run(tmp_path)
    (folder / "samples.jsonl").rename(folder / "kept.jsonl")  # the folder now holds no samples of its own
    (folder / "notes.txt").write_text("mine")
    before = sorted(p.name for p in folder.iterdir())
    assert invoke(command, monkeypatch) == 0
    assert invoke([*command, "rerun=true", "dry_run=true"], monkeypatch) == 0
    assert sorted(p.name for p in folder.iterdir()) == before


def test_a_damaged_line_costs_its_own_sample_only(command, tmp_path, monkeypatch, capsys):
    assert invoke(command, monkeypatch) == 0
    folder = only_run(tmp_path)
    whole = samples(folder)
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    damaged = "X" + lines[0] + "".join(lines[1:])
    (folder / "samples.jsonl").write_text(damaged)
    (folder / "summary.json").unlink()
    assert invoke([*command, "dry_run=true"], monkeypatch) == 0
    assert (folder / "samples.jsonl").read_text() == damaged
    assert "line 1 is damaged" in capsys.readouterr().err
    assert invoke(command, monkeypatch) == 0
    assert comparable(samples(folder)) == comparable(whole)


def test_an_interrupted_repetition_is_continued_and_the_original_kept(command, tmp_path, monkeypatch):
    assert invoke(command, monkeypatch) == 0
    folder = only_run(tmp_path)
    original = (folder / "samples.jsonl").read_text()
    honest = accuracy.AccuracyRun._run_sample

    def interrupted(self, engine, loaded, sample, fidelity):
        if (sample.task, sample.index) != ("niah_single_1", 0):
            raise KeyboardInterrupt
        return honest(self, engine, loaded, sample, fidelity)

    monkeypatch.setattr(accuracy.AccuracyRun, "_run_sample", interrupted)
    assert invoke([*command, "rerun=true"], monkeypatch) == 130
    monkeypatch.undo()
    assert len(samples(folder)) == 1
    assert invoke([*command, "rerun=true"], monkeypatch) == 0
    assert (folder / "previous" / "samples.jsonl").read_text() == original
    assert len(samples(folder)) == 4


@pytest.mark.parametrize("name", ["summary.json", "engine.json", "fidelity/current.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe"], ids=["torn", "binary"])
def test_a_damaged_file_of_a_run_is_named(command, tmp_path, monkeypatch, capsys, name, content):
    arguments = [a.replace("task.samples=2", "task.samples=1") for a in command]
    assert invoke(arguments, monkeypatch) == 0
    folder = only_run(tmp_path)
    if name != "summary.json":
        (folder / "summary.json").unlink()
    (folder / name).write_bytes(content)
    assert invoke(arguments, monkeypatch) == 2
    err = capsys.readouterr().err
    assert str(folder / name) in err.splitlines()[-1]
    assert "Traceback" not in err
    assert invoke([*arguments, "rerun=true"], monkeypatch) == 0


def test_two_writers_of_one_run_do_not_mix(command, tmp_path, monkeypatch, capsys):
    assert invoke(command, monkeypatch) == 0
    run_id = only_run(tmp_path).name
    holder = RunStore(tmp_path / "out", run_id)
    try:
        assert invoke(command, monkeypatch) == 2
        assert "another process is writing it" in capsys.readouterr().err
    finally:
        holder.close()


def test_dry_run_estimates_and_runs_nothing(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "load_model", lambda *_: pytest.fail("a dry run must not load weights"))
    assert invoke([*command, "dry_run=true"], monkeypatch) == 0
    err = capsys.readouterr().err
    assert "4 samples to run" in err
    assert not list((tmp_path / "out").rglob("samples.jsonl"))


def test_an_infinite_margin_keeps_everything(command, tmp_path, monkeypatch):
    # JSON has no infinity: the summary once could not be written.
    arguments = [a for a in command if not a.startswith(("delta=", "task.samples"))]
    assert invoke([*arguments, "delta=inf", "task.samples=1"], monkeypatch) == 0
    summary = json.loads((only_run(tmp_path) / "summary.json").read_text())
    assert summary["method"]["delta"] == "inf"
    assert summary["sparsity"]["keep_io"] == 1.0


def test_dense_counts_its_steps_as_dense_and_has_nothing_to_compare(command, tmp_path, monkeypatch):
    arguments = [a for a in command if not a.startswith(("delta=", "task.samples"))]
    assert invoke([*arguments, "method=dense", "task.samples=1"], monkeypatch) == 0
    summary = json.loads((only_run(tmp_path) / "summary.json").read_text())
    validity = summary["validity"]
    assert (validity["sparse_steps"], validity["dense_steps"]) == (0, validity["expected_steps"])
    assert validity["dense_layers"] == LAYERS
    assert summary["sparsity"] | {"keep_head": 1.0, "keep_io": 1.0, "sparsity": 0.0} == summary["sparsity"]
    assert summary["fidelity"]["mass_recall"] is None
    assert summary["null_reasons"]["fidelity.mass_recall"] == "all layers are dense by configuration"
    assert summary["accuracy"]["average_partial"] is True


def test_prompts_runner_writes_the_official_fields(command, tmp_path, monkeypatch):
    assert invoke([*command, "runner=prompts"], monkeypatch) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "niah_multikey_2.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert {"index", "input", "outputs", "length", "answer_prefix"} <= set(rows[0])


BAD = [
    ("trace=replay", "trace=replay: runner=accuracy has no traces; only runner=fidelity has"),
    ("trace=record", "trace=record: runner=accuracy has no traces; only runner=fidelity has"),
    ("method=quick", "method=quick: expected one of"),
    ("task=quick", "task=quick: expected one of"),
    ("model=quick", "model=quick: expected one of"),
    ("runner=quick", "runner=quick: expected one of"),
    ("executor=quick", "executor=quick: expected one of"),
    ("tracker=quick", "tracker=quick: expected one of"),
    ("task.tasks=[niah_single_9]", "niah_single_9"),
    ("quick=1", "quick=1: there is no key quick; see python run.py --help and conf/"),
    ("+quick=1", "quick=1: there is no key"),
    ("task.quick=1", "task.quick=1: there is no key"),
    (
        "method.token_budget=4",
        "method.token_budget=4: there is no key method.token_budget; it is a key of method=component, quest, ",
    ),
    ("every=8", "every=8: there is no key every; did you mean fidelity.every=8?"),
    ("+every=8", "every=8: there is no key every; did you mean fidelity.every=8?"),
    ("~quick", "error: ~quick: there is no key quick"),
    ("~out", "error: out: this key must not be removed"),
    ("delta=-1", "error: delta=-1: expected a number >= 0"),
    ("+method.foo=1", "error: method.foo=1: expected a knob of method ffd"),
    ("delta=nan", "delta=nan: expected a number >= 0"),
    ("delta=wide", "delta=wide: expected a number >= 0"),
    ("delta_unit=bit", "error: delta_unit=bit: expected nat or log2"),
    ("method.block_size=100", "error: method.block_size=100: expected 64, 128 or 256 (a power of two)"),
    ("method.sub_block=512", "error: method.sub_block=512"),
    ("method.residual=int4", "error: method.residual=int4"),
    ("method.n_sink=-1", "error: method.n_sink=-1"),
    ("method.n_sink=many", "error: method.n_sink=many"),
    ("task.samples=0", "task.samples=0"),
    ("task.length=0", "task.length=0"),
    ("task.length=64", "length=64"),
    ("task.length=100000", "length=100000"),
    ("task.template=quick", "quick"),
    ("task.data_dir=/nowhere", "/nowhere"),
    ("seed=-1", "seed=-1"),
    ("rerun=maybe", "rerun=maybe"),
    ("fidelity.every=-1", "fidelity.every=-1"),
    ("model.path=/nowhere", "/nowhere"),
    ("model.dtype=int8", "int8"),
    ("executor=fused", "executor=fused: needs a GPU"),
    ("out=/proc/nowhere", "/proc/nowhere"),
    ("delta=[1", "delta=[1"),
    ("~seed", "seed: this key must not be removed"),
    ("~engine.graph", "error: engine.graph: this key must not be removed"),  # only 'graph' was named
    ("~engine.fuse", "error: engine.fuse: this key must not be removed"),
    ("~bench.fuse", "~bench.fuse: bench.fuse is called engine.fuse now"),
    ("method.name=null", "method.name=null"),
    ("seed=null", "seed=null: expected an integer"),
    ("task.tasks=5", "task.tasks=5: expected a list of names"),
    ("task.tasks=[[vt]]", "task.tasks="),
    ("task.tasks=[]", "task.tasks"),
    ("task.data_dir=5", "task.data_dir=5"),
    ("task.samples=10000000000", "task.samples=10000000000: expected an integer >= 1 and <= 100000"),
    ("model.path=5", "model.path=5"),
    ("+model.foo=1", "model.foo=1"),
    ("out=[a]", "out=[a]: expected a folder"),
    ("out=''", "out="),
    ("engine.graph=1", "engine.graph=1: expected auto, true or false"),
    ("engine.fuse=quick", "engine.fuse=quick: expected auto, true or false"),
    ("engine.fuse=true", "engine.fuse=true: device cpu: kernels need a GPU; expected auto or false"),
    ("engine.graph=true", "engine.graph=true: device cpu has no CUDA graphs; expected auto or false"),
    ("engine.fuse=[auto,false]", "engine.fuse=[auto,false]: expected auto, true or false; a list of them with runner="),
    ("bench.fuse=false", "bench.fuse=false: bench.fuse is called engine.fuse now"),
    ("method.block_size=128.0", "error: method.block_size=128.0"),
    ("method.sub_block=16.0", "error: method.sub_block=16.0"),
    ("method.n_sink=true", "error: method.n_sink=True"),
    ("method.n_sink=99999999999999999999", "n_sink=99999999999999999999"),
    ("hydra.run.dir=/proc/x", "/proc/x"),
]


@pytest.mark.parametrize(("bad", "expected"), BAD, ids=[b for b, _ in BAD])
def test_bad_input_gets_one_clear_line(command, tmp_path, monkeypatch, capsys, bad, expected):
    assert invoke([*command, bad], monkeypatch) == 2
    err = capsys.readouterr().err.strip()
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert err.splitlines()[-1] == errors[0]
    assert expected in errors[0]
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("samples.jsonl"))


@pytest.mark.parametrize("setting", ["fuse", "graph"])
def test_a_dry_run_refuses_what_the_run_would(command, monkeypatch, capsys, setting):
    assert invoke([*command, f"engine.{setting}=true", "dry_run=true"], monkeypatch) == 2  # was planned
    assert f"error: engine.{setting}=true: device cpu" in capsys.readouterr().err


def test_a_full_standard_output_is_one_line(command):
    if not Path("/dev/full").is_char_device():
        pytest.skip("this system has no device that is always full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "run.py", *command], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]


def test_a_knob_the_method_does_not_have(command, monkeypatch, capsys):
    assert invoke([*command, "method=dense"], monkeypatch) == 2
    assert "delta=1: method dense has no knob delta" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["truncate", "garbage"])
def test_damaged_weights_are_named(command, model_folder, tmp_path, monkeypatch, capsys, damage):
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    weights = broken / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2] if damage == "truncate" else b"not weights at all")
    arguments = [a for a in command if not a.startswith("model.path")]
    assert invoke([*arguments, f"model.path={broken}"], monkeypatch) == 2
    err = capsys.readouterr().err
    assert str(broken) in err
    assert "Traceback" not in err


def test_a_run_leaves_the_loggers_of_the_process_alone(command, tmp_path, monkeypatch):
    # Hydra's "disabled" logging once switched off warnings of the suites.
    import logging

    logger = logging.getLogger("eval.ruler.rows")
    assert invoke([*command, "dry_run=true"], monkeypatch) == 0
    assert not logger.disabled
    assert not list(tmp_path.rglob("*.log"))


def test_help_into_a_pipe_that_closes_is_no_error():
    with subprocess.Popen(
        [sys.executable, "run.py", "--help"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")
