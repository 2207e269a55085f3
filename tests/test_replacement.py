"""Functions that stand in for a model's own while a step runs: in the thread of that step, and nowhere else."""

from __future__ import annotations

import copy
import io
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import ffd
from ffd import replacement
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


class Interrupted(dict[int, Callable[..., Any]]):
    """Functions of threads, of which none can be added any more."""

    def __setitem__(self, thread: int, function: Callable[..., Any]) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("owned", [True, False])
def test_placing_that_fails_half_way_takes_back_what_it_placed(owned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.nn.Linear(4, 4), types.ModuleType("modeling")
    if owned:
        first.forward = lambda x: 2 * x  # type: ignore[method-assign]
    before = dict(vars(first))
    placing = swapped([Replacement(first, "forward", lambda x: 0), Replacement(second, "absent", lambda: "fused")])
    with pytest.raises(AttributeError, match="absent"), placing:
        pytest.fail("the step ran")
    assert vars(first) == before  # the first replacement stayed for good

    class Switch(replacement._Switch):
        def __init__(self, owner: Any, name: str) -> None:
            super().__init__(owner, name)
            if owner is second:
                self._functions = Interrupted()

    second.rotate = original = lambda: "own"  # type: ignore[attr-defined]
    monkeypatch.setattr(replacement, "_Switch", Switch)
    placing = swapped([Replacement(first, "forward", lambda x: 0), Replacement(second, "rotate", lambda: "fused")])
    with pytest.raises(KeyboardInterrupt), placing:
        pytest.fail("the step ran")
    assert vars(first) == before
    assert second.rotate is original
    with swapped([Replacement(first, "forward", lambda x: 0)]):  # and the lock is free
        assert first(3) == 0


def saved_and_loaded(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_a_copy_made_during_a_step_has_the_models_own_functions(copied: Callable[..., Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].forward = model[2].forward  # of its own, and of another module
    own = model(torch.ones(1, 4))
    with swapped([Replacement(part, "forward", lambda x: 0) for part in model]):
        made = copied(model)  # saving failed on a lock, and a copy kept the switches, and so the model itself, for ever
        assert torch.equal(made(torch.ones(1, 4)), own)
    assert made[0].forward.__self__ is made[0]
    assert made[1].forward.__self__ is made[2]
    assert _altered(made[0]) is None  # so that an engine of the copy fuses it
    assert _altered(made[1]) is not None
