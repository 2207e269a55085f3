"""A method from outside with a bug: its run is labelled invalid, or refused with one line that names it."""

from __future__ import annotations

import json
import math

import pytest

from eval.fidelity.forced import ForcedScores
from ffd.methods import KnobError, method_class
from tests.fidelity_runs import common, summary_of, the_run, tiny_folder
from tests.ruler_tokenizer import build
from tests.run_in_process import invoke
from tests.tiny import tiny_model

__all__ = ["tiny_folder"]

NOT_FINITE = '''
from dataclasses import dataclass, replace

import torch

from ffd.methods import Method
from ffd.methods.topk import TopK


@dataclass(frozen=True)
class Broken(Method):
    """Dense storage whose scores are not numbers."""

    name = "broken"

    def new_layer(self, geometry, rows, executor):
        layer = TopK(token_budget=64).new_layer(geometry, rows, executor)
        select = layer.select

        def broken(q, scale):
            selection = select(q, scale)
            return replace(selection, scores=torch.full_like(selection.scores, torch.nan))

        layer.select = broken
        return layer
'''


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder of modules that Python finds."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize("runner", ["fidelity", "accuracy"])
def test_outputs_that_are_not_finite_make_a_run_invalid(runner, elsewhere, tiny_folder, tmp_path, monkeypatch):
    """Once such a run was complete, no law was broken, and its largest KL divergence was 0."""
    (elsewhere / f"nan_{runner}.py").write_text(NOT_FINITE)
    arguments = [f"runner={runner}", "method=dense", f"method.name=nan_{runner}:Broken"]
    assert invoke([*arguments, *common(tiny_folder, tmp_path)], monkeypatch) == 3
    summary = summary_of(the_run(tmp_path))
    assert summary["status"] == "invalid"
    assert "not finite" in summary["reason"]
    if runner == "fidelity":
        assert summary["forced"]["kl_max"] is None


def test_an_accuracy_run_needs_no_probe_to_be_invalid(elsewhere, tiny_folder, tmp_path, monkeypatch, capsys):
    """Once it was complete, with the score of whatever token the choice took among NaN."""
    (elsewhere / "nan_unprobed.py").write_text(NOT_FINITE)
    command = ["method=dense", "method.name=nan_unprobed:Broken", *common(tiny_folder, tmp_path), "fidelity.every=0"]
    assert invoke(command, monkeypatch) == 3
    folder = the_run(tmp_path)
    summary, samples = summary_of(folder), folder / "samples.jsonl"
    assert (summary["status"], summary["reason"]) == ("invalid", "2 of 2 samples: a prediction was not finite")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [(row["finite"], row["new_tokens"]) for row in rows] == [(False, 2)] * 2  # prefill is dense
    assert "status invalid: 2 of 2 samples" in capsys.readouterr().out
    # The same command runs nothing anew and comes to the same; samples of earlier versions do not say.
    assert invoke(command, monkeypatch) == 3
    samples.write_text("".join(json.dumps({k: v for k, v in r.items() if k != "finite"}) + "\n" for r in rows))
    assert invoke(command, monkeypatch) == 0
    assert summary_of(folder)["status"] == "complete"


@pytest.mark.parametrize("runner", ["fidelity", "accuracy"])
def test_a_prompt_that_predicts_nothing_makes_a_run_invalid(runner, tmp_path, monkeypatch):
    """No decode step follows it."""
    model = tiny_model("llama")
    model.lm_head.weight.data[9] = math.nan
    model.save_pretrained(tmp_path / "model")
    build().save_pretrained(tmp_path / "model")
    every = [] if runner == "fidelity" else ["fidelity.every=0"]
    assert invoke([f"runner={runner}", *common(tmp_path / "model", tmp_path), *every], monkeypatch) == 3
    summary = summary_of(the_run(tmp_path))
    assert summary["status"] == "invalid"
    assert summary["reason"].endswith("a prediction was not finite")


@pytest.mark.parametrize("order", [1, -1])
def test_a_divergence_that_is_no_number_survives_a_merge(order):
    """Once Python's max dropped it where it came second, as it does where a run adds up its prompts."""
    first, second = (ForcedScores([1], [1.0], [1.0], [kl], [1], kl) for kl in (0.5, math.nan)[::order])
    assert math.isnan(first.merge(second).kl_max)
    assert ForcedScores().merge(first if order == 1 else second).kl_max == 0.5


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        ("def (:", "syntax_error:X", "cannot import syntax_error (SyntaxError: invalid syntax"),
        ("x = y", "name_error:X", "cannot import name_error (NameError: name 'y' is not defined)"),
        (
            "from ffd.methods import Method\nclass X(Method):\n    name = 'x'\n",
            "no_layer:X",
            "method=no_layer:X: X does not define new_layer",
        ),
        (
            "from ffd.methods import Method\nclass X(Method):\n    def new_layer(self, *_): ...\n",
            "no_name:X",
            "method=no_name:X: X does not define name",
        ),
        ("", ":X", "method=:X: expected package.module:ClassName"),
        ("", ".relative:X", "method=.relative:X: expected package.module:ClassName"),
    ],
)
def test_a_class_that_is_no_method_is_refused_by_name(source, name, said, elsewhere):
    """Once these were a traceback of the user's module, or a knob of the wrong type where there was no knob."""
    if source:
        (elsewhere / f"{name.partition(':')[0]}.py").write_text(source)
    with pytest.raises(KnobError) as refused:
        method_class(name)
    assert said in str(refused.value)
