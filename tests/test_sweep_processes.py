"""Sweeps as processes: failures, kills, two writers, launchers; slow parts only where nothing less would show it."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from experiments.gpus import claimed_gpu, visible_gpus
from experiments.job import Running, run_job
from tests.sweep_runs import ROOT, results, save_tiny_model, small_run


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def sweep(model_folder):
    """A sweep of three jobs, one of which fails."""
    return ["-m", *small_run(model_folder, samples=2), "method=dense,kivi,ffd", "delta=1"]


@pytest.fixture(scope="module")
def undisturbed(sweep, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    return start([*sweep, f"out={out}"]).communicate(timeout=600)[0], results(out), out


def start(arguments, **options):
    options.setdefault("stdout", subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, "run.py", *arguments], cwd=ROOT, stderr=subprocess.STDOUT, text=True, **options
    )


def record(out: Path) -> list[dict]:
    (path,) = (out / "sweeps").glob("*.json")
    return json.loads(path.read_text())["jobs"]


def test_a_dry_run_says_what_each_job_plans_and_calls_none_complete(sweep, tmp_path):
    """Jobs that never ran were complete, and their plan stood in logs that nobody was told of."""
    process = start([*sweep, "method=dense,ffd", f"out={tmp_path}", "dry_run=true"])
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    (plan,) = (tmp_path / "sweeps").glob("*/plan.json")  # apart from the record of what was run
    assert not list((tmp_path / "sweeps").glob("*.json"))
    jobs = json.loads(plan.read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["planned", "planned"]
    assert all("4 samples to run, " in job["reason"] and "about" in job["reason"] for job in jobs)
    assert "job-000.log" in printed.splitlines()[0]
    assert printed.count("4 samples to run, ") >= 2
    assert not list((tmp_path / "runs").glob("*/samples.jsonl"))


def test_a_failed_job_does_not_stop_the_sweep_and_is_shown_with_its_reason(undisturbed):
    printed, runs, out = undisturbed
    assert [job["status"] for job in record(out)] == ["complete", "failed", "complete"]
    assert len(runs) == 2
    assert "failed: method=kivi: method.group_size=32: expected a divisor of head_dim=16" in printed
    assert printed.count("complete") >= 2
    assert "Traceback" not in printed


def test_jobs_are_processes_of_their_own(undisturbed):
    _, runs, out = undisturbed
    commands = [json.loads((out / "runs" / run / "environment.json").read_text())["command"] for run in runs]
    assert all("-m" not in command for command in commands)
    assert sorted(c for command in commands for c in command if c.startswith("method=")) == [
        "method=dense",
        "method=ffd",
    ]


def disturb(sweep, out, kills, seed):
    """Kill the sweep at random moments, then let it end; returns the samples seen after each kill."""
    moments = random.Random(seed)
    counts = []
    for _ in range(kills):
        process = start([*sweep, f"out={out}"], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + moments.uniform(1.0, 25.0)
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.wait()
        time.sleep(0.2)  # for the kernel to take the job's process too
        counts.append(sum(p.read_bytes().count(b"\n") for p in out.glob("runs/*/samples.jsonl")))
    process = start([*sweep, f"out={out}"])
    process.communicate(timeout=600)
    return counts


def check_disturbed(sweep, undisturbed, out, kills):
    counts = disturb(sweep, out, kills, seed=kills)
    assert counts == sorted(counts), "a kill lost a finished sample"
    assert results(out) == undisturbed[1]
    assert [job["status"] for job in record(out)] == ["complete", "failed", "complete"]


def test_three_kills_change_nothing(sweep, undisturbed, tmp_path):
    check_disturbed(sweep, undisturbed, tmp_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_change_nothing(sweep, undisturbed, tmp_path):
    check_disturbed(sweep, undisturbed, tmp_path, 20)


def test_a_killed_sweep_leaves_no_writer_behind(sweep, tmp_path):
    process = start([*sweep, f"out={tmp_path}"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("runs/*/config.yaml")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_sweeps_at_once_do_not_mix(sweep, undisturbed, tmp_path):
    # They wrote each other's logs: a job that the other sweep was at had that one's last line as its reason.
    processes = [start([*sweep, f"out={tmp_path}"]) for _ in range(2)]
    printed = {process.wait(timeout=600): process.communicate()[0] for process in processes}
    assert printed.keys() == {1, 2}  # a job of the sweep fails; the other sweep was refused
    assert "another process is running it" in printed[2]
    assert printed[2].count("\n") == 1
    assert [job["status"] for job in record(tmp_path)] == ["complete", "failed", "complete"]
    assert results(tmp_path) == undisturbed[1]


def test_an_interrupt_reaches_the_job_and_the_table_is_printed(sweep, tmp_path):
    # A test suite in the background of a shell ignores the signal, and its children would inherit that.
    process = start([*sweep, f"out={tmp_path}"], preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    deadline = time.monotonic() + 240
    while not any(p.stat().st_size for p in tmp_path.glob("runs/*/samples.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in printed
    assert "not run yet" in printed
    (summary,) = tmp_path.glob("runs/*/summary.json")
    stored = json.loads(summary.read_text())["status"]
    assert (stored, record(tmp_path)[0]["status"]) in (("partial", "interrupted"), ("complete", "complete"))
    assert record(tmp_path)[-1]["status"] == "missing"


@pytest.mark.parametrize(
    ("launcher", "package", "extra"),
    [
        ("joblib", "hydra_plugins.hydra_joblib_launcher", ["hydra.launcher.n_jobs=2"]),
        ("submitit_local", "hydra_plugins.hydra_submitit_launcher", ["hydra.launcher.timeout_min=10"]),
        pytest.param(
            "ray", "hydra_plugins.hydra_ray_launcher", ["+hydra.launcher.ray.init.num_cpus=1"], marks=pytest.mark.slow
        ),
    ],
)
def test_hydras_launchers_give_the_same_results(sweep, undisturbed, tmp_path, launcher, package, extra):
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"{package} is not installed: pip install 'ffd[{launcher.partition('_')[0]}]'")
    process = start([*sweep, f"out={tmp_path}", f"hydra/launcher={launcher}", *extra])
    printed, _ = process.communicate(timeout=600)
    assert [job["status"] for job in record(tmp_path)] == ["complete", "failed", "complete"], printed
    assert results(tmp_path) == undisturbed[1]


def test_gpus_are_claimed_one_job_each(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test-a,test-b")
    gpus = visible_gpus()
    with claimed_gpu(gpus) as first, claimed_gpu(gpus) as second:
        assert {first, second} == {"test-a", "test-b"}
        code = "from experiments.gpus import *\nwith claimed_gpu(visible_gpus()) as gpu: print(gpu)"
        third = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            third.wait(timeout=2)
    assert third.communicate(timeout=60)[0].strip() in ("test-a", "test-b")


def test_a_job_that_waits_for_a_gpu_can_be_interrupted(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "waited-for")
    running = Running()
    threading.Timer(0.3, running.stop).start()
    with claimed_gpu(visible_gpus()):
        outcome = run_job(["--help"], tmp_path, tmp_path / "job", running)
    assert outcome.status == "interrupted"
    assert not (tmp_path / "job.log").exists()


def test_a_machine_without_gpus_runs_one_job_at_a_time(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    with claimed_gpu([]) as gpu:
        assert gpu is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_job_that_cannot_be_matched_is_failed_with_its_reason_and_dense_simply_run(model_folder, tmp_path):
    arguments = ["-m", *small_run(model_folder, samples=1), "method=dense,ffd,topk", "match.samples=1", "seed=2"]
    process = start([*arguments, "match.keep_io=0.05", f"out={tmp_path}"])
    printed = process.communicate(timeout=600)[0]
    assert process.returncode == 1
    assert "method=dense: runs without match.samples=1, match.keep_io=0.05" in printed
    assert [job["status"] for job in record(tmp_path)] == ["complete", "failed", "complete"]
    assert "match.keep_io=0.05: method ffd cannot meet it on" in record(tmp_path)[1]["reason"]
