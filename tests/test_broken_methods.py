"""A method from outside with a bug: its run is labelled invalid, or refused with one line that names it."""

from __future__ import annotations

import json
import math

import pytest
import torch

import ffd.methods
from eval.fidelity.forced import ForcedScores
from eval.fidelity.traces import Trace
from experiments.accuracy import AccuracyRun
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


@dataclass(frozen=True)
class NoOutput(Method):
    """Exact scores, and outputs that are not numbers."""

    name = "no-output"

    def new_layer(self, geometry, rows, executor):
        layer = TopK(token_budget=64).new_layer(geometry, rows, executor)
        layer.decode = lambda q, scale: torch.full_like(q, torch.nan)
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
    assert invoke([*arguments, *common(tiny_folder, tmp_path, follows=runner == "fidelity")], monkeypatch) == 3
    summary = summary_of(the_run(tmp_path))
    assert summary["status"] == "invalid"
    assert "not finite" in summary["reason"]
    if runner == "fidelity":
        assert summary["forced"]["kl_max"] is None


NOTHING = '''
from dataclasses import dataclass, replace

from ffd.methods import Method
from ffd.methods.topk import TopK


@dataclass(frozen=True)
class Nothing(Method):
    """Selects as top-k does; its first heads attend to nothing."""

    name = "nothing"

    heads: int = 4

    def new_layer(self, geometry, rows, executor):
        layer = TopK(token_budget=64).new_layer(geometry, rows, executor)
        select = layer.select

        def broken(q, scale):
            selection = select(q, scale)
            attended = selection.attended.clone()
            attended[:, : self.heads] = False
            return replace(selection, attended=attended)

        layer.select = broken
        return layer
'''


@pytest.mark.parametrize(
    ("runner", "heads", "every", "said"),
    [
        ("accuracy", 4, 0, "layer 0, kv head 0 loaded 0 tokens in "),
        ("accuracy", 2, 0, "layer 0, kv head 0 loaded 0 tokens in "),
        ("accuracy", 1, 3, "a head attended to nothing or its scores were not finite in "),
        ("fidelity", 4, 3, "layer 0, kv head 0 loaded 0 tokens in "),
        ("fidelity", 1, 3, "a head attended to nothing or its scores were not finite in "),
    ],
)
def test_a_head_that_attends_to_nothing_makes_a_run_invalid(
    runner, heads, every, said, elsewhere, tiny_folder, tmp_path, monkeypatch, capsys
):
    """Once such a run was complete: its outputs are zeros, which are numbers. One head of a group only a probe sees."""
    module = f"nothing_{runner}_{heads}_{every}"
    (elsewhere / f"{module}.py").write_text(NOTHING)
    given = [f"runner={runner}", "method=dense", f"method.name={module}:Nothing", f"+method.heads={heads}"]
    given += [*common(tiny_folder, tmp_path, follows=runner == "fidelity"), f"fidelity.every={every}"]
    assert invoke(given, monkeypatch) == 3
    summary = summary_of(the_run(tmp_path))
    assert summary["status"] == "invalid"
    assert said in summary["reason"]
    assert f"status invalid: {summary['reason']} · " in capsys.readouterr().out


RAISES = '''
from dataclasses import dataclass

import torch

from ffd.methods import Method, SearchKnob
from ffd.methods.topk import TopK


@dataclass(frozen=True)
class Raises(Method):
    """Raises where it is told to."""

    name = "raises"
    search_knob = SearchKnob("budget", 1, 100)

    budget: int = 8
    at: str = ""

    def new_layer(self, geometry, rows, executor):
        if self.at == "new_layer":
            raise KeyError("heads")
        layer = TopK(token_budget=8).new_layer(geometry, rows, executor)
        if self.at:
            setattr(layer, self.at, broken)
        return layer


def broken(q, scale):
    return q @ torch.ones(3, 3)
'''
SAID = {
    "new_layer": "KeyError in new_layer (",
    "select": "RuntimeError in broken (",
    "decode": "RuntimeError in broken (",
}


@pytest.mark.parametrize("at", SAID)
@pytest.mark.parametrize("runner", ["accuracy", "fidelity", "replay", "match"])
def test_an_error_of_a_method_is_reported_with_its_name(
    at, runner, elsewhere, tiny_folder, tmp_path, monkeypatch, capsys
):
    """Once the line had the message alone; while a knob was matched it was a traceback."""
    module = f"raises_{runner}_{at}"
    (elsewhere / f"{module}.py").write_text(RAISES)
    given = ["method=dense", f"method.name={module}:Raises", f"+method.at={at}"]
    given += common(tiny_folder, tmp_path, 1, follows=runner != "accuracy")
    match = ["match.keep_io=0.1", "match.samples=1", "+method.budget=8"]
    save_trace(tmp_path / "traces" / "one.safetensors", values=True)
    points = f"{{quest: {{}}, mine: {{method: '{module}:Raises', at: [{at}]}}}}"
    arguments = {
        "accuracy": ["runner=accuracy", "fidelity.every=1", *given],
        "fidelity": ["runner=fidelity", *given],
        "match": ["runner=fidelity", *match, *given],
        "replay": [*replay(points, tmp_path / "traces", tmp_path), "tracker=none"],
    }
    assert invoke(arguments[runner], monkeypatch) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert f"method={module}:Raises: {SAID[at]}{module}.py, line " in said[0]
    assert ("'heads'" if at == "new_layer" else "cannot be multiplied") in said[0]
    if runner != "match":
        run = the_run(tmp_path)
        assert summary_of(run)["reason"] in said[0]
        assert f"{run / 'traceback.txt'} says more" in said[0]
        assert f"{module}.py" in (run / "traceback.txt").read_text()


def test_an_error_from_elsewhere_is_not_the_methods(elsewhere, tiny_folder, tmp_path, monkeypatch, capsys):
    (elsewhere / "innocent.py").write_text(RAISES)
    given = ["runner=fidelity", "method=dense", "method.name=innocent:Raises", *common(tiny_folder, tmp_path, 1)]
    with monkeypatch.context() as broken:
        broken.setattr("experiments.fidelity.read_ledger", lambda *_: {}["counters"])
        assert invoke(given, broken) == 1
    assert ": KeyError: 'counters'; finished samples are kept" in capsys.readouterr().err
    traceback = the_run(tmp_path) / "traceback.txt"
    assert "read_ledger" in traceback.read_text()
    assert invoke(given, monkeypatch) == 0
    assert not traceback.exists()


def test_an_error_of_a_method_in_the_package_is_reported_with_its_name(tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ffd.methods.streaming.reference.key_scores", lambda *_: {}["queries"])
    assert invoke(["runner=fidelity", "method=streaming", *common(tiny_folder, tmp_path, 1)], monkeypatch) == 1
    assert ": method=streaming: KeyError in select (streaming.py, line " in capsys.readouterr().err


def save_trace(path, *, values):
    generator = torch.Generator().manual_seed(0)
    keys, exact = torch.randn(2, 1, 1, 40, 16, generator=generator)
    trace = Trace(
        scale=0.25,
        keys={0: keys},
        values={0: exact} if values else {},
        queries={0: torch.randn(2, 1, 2, 16, generator=generator)},
        lengths=torch.tensor([[39], [40]], dtype=torch.int32),
        active=torch.ones(2, 1, dtype=torch.bool),
        prompt_lengths=torch.tensor([38], dtype=torch.int32),
    )
    trace.save(path)


def replay(point, traces, out):
    sweep = f"+fidelity.sweep={point}"
    return ["runner=fidelity", "trace=replay", "~fidelity.sweep", sweep, f"fidelity.traces={traces}", f"out={out}"]


@pytest.mark.parametrize(("name", "values"), [("Broken", True), ("Broken", False), ("NoOutput", True)])
def test_a_point_that_is_not_finite_makes_a_sweep_invalid(name, values, elsewhere, tmp_path, monkeypatch, capsys):
    """Once such a sweep was complete, its figures null."""
    module = f"nan_replay_{name.lower()}_{values}".lower()
    (elsewhere / f"{module}.py").write_text(NOT_FINITE)
    save_trace(tmp_path / "traces" / "one.safetensors", values=values)
    points = f"{{topk: {{token_budget: [8]}}, broken: {{method: '{module}:{name}'}}}}"
    assert invoke([*replay(points, tmp_path / "traces", tmp_path), "tracker=none"], monkeypatch) == 3
    summary = summary_of(the_run(tmp_path))
    assert summary["status"] == "invalid"
    assert [point["broken"] is None for point in summary["points"]] == [True, False]
    assert summary["reason"].startswith("broken: ")
    assert "not finite" in summary["reason"]
    assert f"status invalid: {summary['reason']}" in capsys.readouterr().out


def test_figures_that_a_sound_method_does_not_have_leave_a_sweep_complete(tmp_path, monkeypatch):
    """It makes no estimate to rank, and one trace has no values to make outputs of."""
    for name, values in (("with", True), ("without", False)):
        save_trace(tmp_path / "traces" / f"{name}.safetensors", values=values)
    points = "{strided: {method: 'tests.toy_method:Strided'}}"
    assert invoke([*replay(points, tmp_path / "traces", tmp_path), "tracker=none"], monkeypatch) == 0
    summary = summary_of(the_run(tmp_path))
    assert (summary["status"], summary["laws_broken"]) == ("complete", 0)
    (point,) = summary["points"]
    assert point["spearman"] is None
    assert point["mass_recall"] is not None


def test_an_accuracy_run_needs_no_probe_to_be_invalid(elsewhere, tiny_folder, tmp_path, monkeypatch, capsys):
    """Once it was complete, with the score of whatever token the choice took among NaN."""
    (elsewhere / "nan_unprobed.py").write_text(NOT_FINITE)
    command = ["method=dense", "method.name=nan_unprobed:Broken", *common(tiny_folder, tmp_path, follows=False)]
    command.append("fidelity.every=0")
    assert invoke(command, monkeypatch) == 3
    folder = the_run(tmp_path)
    summary, samples = summary_of(folder), folder / "samples.jsonl"
    assert (summary["status"], summary["reason"]) == ("invalid", "2 of 2 samples: a prediction was not finite")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [(row["finite"], row["new_tokens"]) for row in rows] == [(False, 2)] * 2  # prefill is dense
    assert "status invalid: 2 of 2 samples" in capsys.readouterr().out
    # The same command runs nothing anew and comes to the same; samples of earlier versions do not say, and leave it to
    # the counters: NaN are among no largest scores.
    assert invoke(command, monkeypatch) == 3
    samples.write_text("".join(json.dumps({k: v for k, v in r.items() if k != "finite"}) + "\n" for r in rows))
    assert invoke(command, monkeypatch) == 3
    assert summary_of(folder)["reason"].startswith("a head attended to nothing: ")


@pytest.mark.parametrize("first", [1, 2])
def test_a_run_is_invalid_when_its_last_shard_is_done(first, elsewhere, tiny_folder, tmp_path, monkeypatch):
    """Once the shard that met the problem ended the run, and what the other one did counted nowhere."""
    (elsewhere / f"nan_shard_{first}.py").write_text(NOT_FINITE)
    command = ["method=dense", f"method.name=nan_shard_{first}:Broken", *common(tiny_folder, tmp_path, follows=False)]
    command.append("fidelity.every=0")
    honest = AccuracyRun._run_sample

    def broken_once(self, engine, loaded, sample, fidelity):
        return {**honest(self, engine, loaded, sample, fidelity), "finite": sample.index != 0}

    monkeypatch.setattr(AccuracyRun, "_run_sample", broken_once)
    assert invoke([*command, f"shard={first}/2"], monkeypatch) == 0
    folder = the_run(tmp_path)
    summary = summary_of(folder)
    assert summary["status"] == "partial"
    assert summary["reason"].startswith("1 of 2 samples are left to other shards")
    assert summary["reason"].endswith("not finite") == (first == 1)
    assert invoke([*command, f"shard={3 - first}/2"], monkeypatch) == 3
    summary = summary_of(folder)
    assert (summary["status"], summary["reason"]) == ("invalid", "1 of 2 samples: a prediction was not finite")
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 2
    assert not (folder / "shards").exists()


@pytest.mark.parametrize("runner", ["fidelity", "accuracy"])
def test_a_prompt_that_predicts_nothing_makes_a_run_invalid(runner, tmp_path, monkeypatch):
    """No decode step follows it."""
    model = tiny_model("llama")
    model.lm_head.weight.data[9] = math.nan
    model.save_pretrained(tmp_path / "model")
    build().save_pretrained(tmp_path / "model")
    every = [] if runner == "fidelity" else ["fidelity.every=0"]
    given = common(tmp_path / "model", tmp_path, follows=runner == "fidelity")
    assert invoke([f"runner={runner}", *given, *every], monkeypatch) == 3
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


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\ndef (:\n", "SyntaxError (NAME.py, line 2): invalid syntax"),
        ("x = 1\n\nx = y\n", "NameError (NAME.py, line 3): name 'y' is not defined"),
        (
            "import json\njson.loads('')\n",
            "JSONDecodeError (NAME.py, line 2): Expecting value: line 1 column 1 (char 0)",
        ),
        ("from ffd.methods import Methods\n", "ImportError (NAME.py, line 1): cannot import name 'Methods'"),
    ],
)
def test_a_module_of_the_package_that_does_not_import_is_one_line(source, said, tmp_path, monkeypatch, capsys):
    """Once it was a traceback of forty lines, most of them Hydra's."""
    name = f"stride_{said.partition('E')[0].lower()}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setattr(ffd.methods, "__path__", [*ffd.methods.__path__, str(tmp_path)])
    assert invoke(["method=dense", f"method.name={name}", f"out={tmp_path}"], monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: method={name}: {said.replace('NAME', name)}")
    assert error.count("\n") == 1
