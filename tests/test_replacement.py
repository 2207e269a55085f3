"""Functions that stand in for a model's own while a step runs: in the thread of that step, and nowhere else."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import ffd
from ffd.fused_model import _altered
from ffd.fusion import Fusion
from ffd.methods import create
from ffd.replacement import Replacement, standing, swapped
from tests.tiny import random_prompt, tiny_model

PATIENCE = 60  # seconds until a thread that waits for another gives up: a deadlock is a failure, not a hang


class Turns:
    """Two threads that go on one after the other, in an order that is given."""

    def __init__(self) -> None:
        self._done: dict[str, threading.Event] = {}

    def reached(self, name: str) -> threading.Event:
        return self._done.setdefault(name, threading.Event())

    def wait(self, name: str) -> None:
        assert self.reached(name).wait(PATIENCE), f"nobody came to {name}"


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Results of functions that run in a thread each."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(f) for f in functions]]


def always(token: int, meet: threading.Barrier) -> Callable[[torch.Tensor], torch.Tensor]:
    """An output head whose likeliest token is one and the same; two of them wait for each other in every step."""

    def head(x: torch.Tensor) -> torch.Tensor:
        meet.wait(PATIENCE)
        return torch.nn.functional.one_hot(torch.tensor(token), 64).expand(*x.shape[:-1], 64).float()

    return head


def test_two_threads_step_two_engines_of_one_model() -> None:
    model, meet = tiny_model("llama"), threading.Barrier(2)
    engines = [ffd.Engine(model, create("dense"), capacity=40) for _ in range(2)]
    for token, engine in enumerate(engines, 7):
        engine._fusion.replacements.append(Replacement(model.lm_head, "forward", always(token, meet)))
    first, second = together(*(lambda e=e: e.generate([random_prompt(20)], 9).tokens[0] for e in engines))
    assert first[1:] == [7] * 8  # a thread's steps met whichever head had been put in place last
    assert second[1:] == [8] * 8
    assert first[0] == second[0]  # of the prefill, which has the model's own head
    assert all("forward" not in vars(m) for m in model.modules())  # where the other thread's head stayed for ever


def test_a_step_that_ends_first_takes_back_its_own_replacement_alone() -> None:
    file, turns = types.ModuleType("modeling"), Turns()
    file.rotate = original = lambda: "own"  # type: ignore[attr-defined]

    def first() -> list[str]:
        with swapped([Replacement(file, "rotate", lambda: "first")]):
            turns.reached("first is in").set()
            turns.wait("second is in")
            seen = [file.rotate()]
        turns.reached("first is out").set()
        return [*seen, file.rotate()]

    def second() -> list[str]:
        turns.wait("first is in")
        seen = [file.rotate()]
        with swapped([Replacement(file, "rotate", lambda: "second")]):
            turns.reached("second is in").set()
            turns.wait("first is out")
            seen.append(file.rotate())
        return seen

    assert together(first, second) == [["first", "own"], ["own", "second"]]
    assert file.rotate is original


def test_other_use_of_the_model_meets_its_own_modules_meanwhile() -> None:
    model, prompt = tiny_model("llama"), torch.tensor([random_prompt(20)])
    own = model(prompt).logits
    meet, turns = threading.Barrier(1), Turns()

    def step() -> None:
        with Fusion([Replacement(model.lm_head, "forward", always(7, meet))]).active():
            assert int(model(prompt).logits[0, -1].argmax()) == 7
            turns.reached("in place").set()
            turns.wait("used")

    def use() -> torch.Tensor:
        turns.wait("in place")
        try:
            return model(prompt).logits
        finally:
            turns.reached("used").set()

    assert torch.equal(together(step, use)[1], own)


def test_a_step_elsewhere_does_not_make_a_module_look_altered() -> None:
    file, module = types.ModuleType("modeling"), torch.nn.Linear(4, 4)
    file.rotate = original = lambda: "own"  # type: ignore[attr-defined]
    replacements = [Replacement(file, "rotate", lambda: "fused"), Replacement(module, "forward", lambda x: x)]
    with swapped(replacements):
        assert standing(file, "rotate") is original  # what a replacement that is made now must fall back on
        assert standing(module, "forward") is None
        assert _altered(module) is None
    module.forward = lambda x: 2 * x  # type: ignore[method-assign]
    assert _altered(module) == "Linear has hooks or a forward of its own"
    with swapped(replacements):
        assert _altered(module) == "Linear has hooks or a forward of its own"
    assert int(module(3)) == 6


def test_replacements_in_one_thread_may_nest() -> None:
    file = types.ModuleType("modeling")
    file.rotate = original = lambda: "own"  # type: ignore[attr-defined]
    seen = []
    with swapped([Replacement(file, "rotate", lambda: "outer")]):
        with swapped([Replacement(file, "rotate", lambda: "inner")]):
            seen.append(file.rotate())
        seen.append(file.rotate())
    assert seen == ["inner", "outer"]
    assert file.rotate is original
