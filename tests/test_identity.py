"""What makes a run another run: changed code anywhere that decides its results, and no changed comment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments import identity
from experiments.lifecycle import code_and_machine

ROOTS = ["ffd.engine", "ffd.methods.ffd", "eval.fidelity", "eval.ruler"]
"""Of an accuracy run; `code_and_machine` adds what every run depends on."""


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the packages, whose code is fingerprinted in place of the real one."""
    for package in identity.PACKAGES:
        shutil.copytree(Path(identity.__file__).parent.parent / package, tmp_path / package)
    monkeypatch.setattr(identity, "_ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "file",
    [
        "ffd/engine.py",
        "ffd/cache_layer.py",
        "ffd/kernels/common.py",  # imported by a kernel that the method imports when it first runs
        "ffd/methods/base.py",
        "eval/fidelity/metrics.py",
        "eval/ruler/suite.py",
        "eval/statistics.py",
        "eval/models.py",
        "eval/model_facts.py",
        "eval/answer.py",
    ],
)
def test_changed_code_counts_and_a_changed_comment_does_not(copy, file):
    before = code_and_machine(ROOTS)
    path = copy / file
    source = path.read_text()
    path.write_text(source.replace('"""', '"""Reworded. ', 1) + "\n# a remark\n")
    assert code_and_machine(ROOTS) == before
    path.write_text(source + "\nADDED = 1\n")
    assert code_and_machine(ROOTS) != before


def test_another_method_does_not_count(copy):
    before = code_and_machine(ROOTS)
    path = copy / "ffd" / "methods" / "quest.py"
    path.write_text(path.read_text() + "\nADDED = 1\n")
    assert code_and_machine(ROOTS) == before


def test_a_method_from_elsewhere_counts_with_what_it_imports():
    both = [identity.code_fingerprint([*ROOTS, name]) for name in ("tests.toy_method", "ffd.methods.base")]
    assert both[0] != both[1]
