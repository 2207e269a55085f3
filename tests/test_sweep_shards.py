"""One run split over processes: nothing lost, nothing doubled, the same results however it was split."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from experiments import accuracy
from experiments.fidelity_log import FidelityLog
from experiments.shards import Shard, ShardStore, merge_shards
from experiments.store import RunStore, read_samples
from tests.run_in_process import invoke
from tests.sweep_runs import ROOT, results, save_tiny_model, small_run


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def command(model_folder):
    return [*small_run(model_folder, samples=2), "delta=1", "fidelity.every=8"]


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert invoke([*command, f"out={out}"], monkeypatch) == 0
    return results(out)


def test_shards_of_any_split_end_as_the_undivided_run(command, whole, tmp_path, monkeypatch):
    for count in (2, 3):
        out = tmp_path / f"split-{count}"
        for index in range(count, 0, -1):
            assert invoke([*command, f"shard={index}/{count}", f"out={out}"], monkeypatch) == 0
            (folder,) = (out / "runs").iterdir()
            status = json.loads((folder / "summary.json").read_text())["status"]
            assert status == ("complete" if index == 1 else "partial")
        assert results(out) == whole
        assert not (folder / "shards").exists()


def test_the_split_may_change_and_the_undivided_command_finishes(command, whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert invoke([*command, "shard=1/3", f"out={out}"], monkeypatch) == 0
    assert invoke([*command, "shard=2/2", f"out={out}"], monkeypatch) == 0
    ran = []
    honest = accuracy.AccuracyRun._run_sample

    def counting(self, engine, loaded, sample, fidelity):
        ran.append((sample.task, sample.index))
        return honest(self, engine, loaded, sample, fidelity)

    monkeypatch.setattr(accuracy.AccuracyRun, "_run_sample", counting)
    assert invoke([*command, f"out={out}"], monkeypatch) == 0
    # 1/3 ran positions 0 and 3 of 4; of 2/2's positions 1 and 3 only 1 was left.
    assert ran == [("niah_multikey_2", 0)]
    assert results(out) == whole


def test_a_shards_traceback_outlives_the_others(command, whole, tmp_path, monkeypatch, capsys):
    """Once the next shard to begin removed it, and the line that named it was left."""
    out = tmp_path / "out"
    with monkeypatch.context() as broken:
        broken.setattr(accuracy.AccuracyRun, "_run_sample", lambda *_: {}["heads"])
        assert invoke([*command, "shard=1/2", f"out={out}"], broken) == 1
    (said,) = out.glob("runs/*/shards/1-of-2/traceback.txt")
    assert f"{said} says more" in capsys.readouterr().err
    assert invoke([*command, "shard=2/2", f"out={out}"], monkeypatch) == 0
    assert "KeyError: 'heads'" in said.read_text()
    assert invoke([*command, "shard=1/2", f"out={out}"], monkeypatch) == 0
    assert results(out) == whole
    assert not list(out.rglob("traceback.txt"))


def test_shards_at_the_same_time(command, whole, tmp_path):
    out = tmp_path / "out"
    processes = [
        subprocess.Popen(
            [sys.executable, "run.py", *command, f"shard={i}/2", f"out={out}"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for i in (1, 2)
    ]
    assert [p.wait(timeout=300) for p in processes] == [0, 0]
    assert results(out) == whole


def test_a_kill_while_merging_loses_and_doubles_nothing(command, whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert invoke([*command, "shard=1/2", f"out={out}"], monkeypatch) == 0
    (folder,) = (out / "runs").iterdir()
    kept = shutil.copytree(folder, tmp_path / "kept")
    order = [(row["task"], row["index"]) for row in whole[folder.name][0]]
    merge_shards(folder, {}, order, unit=128)
    # As if killed after the rows and the fidelity were written, before the shards were removed.
    shutil.copytree(kept / "shards", folder / "shards")
    merge_shards(folder, read_samples(folder / "samples.jsonl"), order, unit=128)
    assert len(FidelityLog.covered_by(folder / "fidelity")) == 2
    assert invoke([*command, f"out={out}"], monkeypatch) == 0
    assert results(out) == whole


def test_logs_that_share_some_samples_are_refused(tmp_path):
    for name, covered in (("a", ["vt/0"]), ("b", ["vt/0", "vt/1"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "current.json").write_text(json.dumps({"file": None, "samples": covered}))
    with pytest.raises(ValueError, match="shares samples"):
        FidelityLog(tmp_path / "a", 16).absorb(FidelityLog(tmp_path / "b", 16))


def test_who_may_write_at_the_same_time(tmp_path):
    first = ShardStore(tmp_path, "run", Shard(1, 2))
    second = ShardStore(tmp_path, "run", Shard(2, 2))
    for shard in (Shard(1, 2), Shard(1, 3)):
        with pytest.raises(ValueError, match=r"another process is writing it|is being written as"):
            ShardStore(tmp_path, "run", shard)
    with pytest.raises(ValueError, match="another process is writing it"):
        RunStore(tmp_path, "run")
    first.close()
    second.close()
    whole = RunStore(tmp_path, "run")
    with pytest.raises(ValueError, match="another process is writing it"):
        ShardStore(tmp_path, "run", Shard(1, 2))
    whole.close()


@pytest.mark.parametrize("bad", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3", "1.5/2"])
def test_bad_shards_get_one_line(command, monkeypatch, capsys, bad):
    assert invoke([*command, f"shard='{bad}'"], monkeypatch) == 2
    assert f"error: shard={bad}: expected i/n with 1 <= i <= n" in capsys.readouterr().err


@pytest.mark.parametrize("extra", ["rerun=true", "runner=prompts"])
def test_what_shards_cannot_do(command, tmp_path, monkeypatch, capsys, extra):
    assert invoke([*command, "shard=1/2", extra, f"out={tmp_path}/out"], monkeypatch) == 2
    assert "shard=1/2" in capsys.readouterr().err
