"""Advice on busy cores: given where a CPU run would crawl, and nowhere else."""

from __future__ import annotations

import os

import pytest

from experiments.busy_cores import advice
from tests.run_in_process import invoke

ARGUMENTS = ["runner=throughput", "bench.geometry=toy", "tracker=none", "method=dense", "bench.T=256"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def of(load: float, cores: int | None = 4, threads: str | None = None) -> None:
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if threads is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)

    return of


def test_busy_cores_are_said_in_one_line(machine) -> None:
    machine(11.94)
    said = advice("cpu")
    assert said is not None
    assert said.startswith("load average 11.9 on 4 cores: ")
    assert "OMP_NUM_THREADS=1" in said
    assert "\n" not in said


@pytest.mark.parametrize("load", [0.0, 4.0, 6.0])
def test_cores_that_are_idle_or_just_full_need_none(machine, load: float) -> None:
    machine(load)
    assert advice("cpu") is None


def test_where_threads_are_chosen_or_do_not_matter_there_is_none(machine) -> None:
    machine(50.0, threads="2")
    assert advice("cpu") is None
    machine(50.0)
    assert advice("NVIDIA H200") is None
    machine(50.0, cores=1)
    assert advice("cpu") is None
    machine(50.0, cores=None)
    assert advice("cpu") is None


def test_a_machine_without_load_averages_is_no_error(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(50.0)
    monkeypatch.delattr(os, "getloadavg")
    assert advice("cpu") is None


def test_load_averages_that_cannot_be_had_are_no_error(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def unobtainable() -> tuple[float, float, float]:
        raise OSError("Load averages are unobtainable")

    machine(50.0)
    monkeypatch.setattr(os, "getloadavg", unobtainable)
    assert advice("cpu") is None  # the error ended the run


def test_a_run_says_it_once_and_only_when_it_runs(machine, tmp_path, monkeypatch, capsys) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("says what a run without a GPU prints")
    command = [*ARGUMENTS, f"out={tmp_path}"]
    for load, extra, said in (
        (0.5, [], 0),
        (99.0, ["rerun=true"], 1),
        (99.0, [], 0),
        (99.0, ["seed=1", "dry_run=true"], 0),
    ):
        machine(load)
        assert invoke([*command, *extra], monkeypatch) == 0
        printed = capsys.readouterr()
        assert (printed.out + printed.err).count("load average") == said
