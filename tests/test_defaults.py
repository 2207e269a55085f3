"""What falls to a laptop's size without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.defaults import DEMO_LENGTH, DEMO_SAMPLES, DEMO_TASKS, fill_task

OPEN = {"name": "ruler", "length": None, "samples": None, "tasks": None}


def filled(*, runner: str = "accuracy", has_gpu: bool = False, **given: Any) -> tuple[tuple[Any, ...], str]:
    task, notes = fill_task({**OPEN, **given}, runner=runner, context_length=8192, has_gpu=has_gpu)
    return (task["length"], task["samples"], task["tasks"]), " ".join(notes)


def test_nothing_given() -> None:
    task, said = filled()
    assert task == (DEMO_LENGTH, DEMO_SAMPLES, list(DEMO_TASKS))
    assert "no GPU" in said
    assert "task.samples=500" in said


def test_named_tasks_keep_the_few_samples() -> None:
    """Naming tasks once brought 500 samples back: the README's first comparison would have taken days on a laptop."""
    task, said = filled(tasks=["niah_single_1", "vt"])
    assert task == (DEMO_LENGTH, DEMO_SAMPLES, ["niah_single_1", "vt"])
    assert said == (
        "no GPU: cut down to 1024 tokens of length and 5 samples a task; "
        "task.length=8192 task.samples=500 gives what a GPU would have run"
    )


def test_tasks_that_1024_tokens_cannot_hold_keep_the_models_length() -> None:
    task, said = filled(tasks=["cwe"])
    assert task == (8192, DEMO_SAMPLES, ["cwe"])
    assert said == "no GPU: cut down to 5 samples a task; task.samples=500 gives what a GPU would have run"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"length": 4096}, (4096, DEMO_SAMPLES, None)),
        ({"length": 4096, "samples": 500}, (4096, 500, None)),
        ({"samples": 2, "tasks": "vt"}, (DEMO_LENGTH, 2, "vt")),
        ({"samples": 2}, (DEMO_LENGTH, 2, list(DEMO_TASKS))),
    ],
)
def test_what_is_given_stays(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert filled(**given)[0] == expected


@pytest.mark.parametrize("where", [{"has_gpu": True}, {"runner": "prompts"}])
def test_a_gpu_and_written_prompts_get_the_official_protocol(where: dict[str, Any]) -> None:
    assert filled(**where) == ((8192, None, None), "")


def test_other_tasks_are_left_alone() -> None:
    assert fill_task({"name": "longbench"}, runner="accuracy", context_length=8192, has_gpu=False) == (
        {"name": "longbench"},
        (),
    )
