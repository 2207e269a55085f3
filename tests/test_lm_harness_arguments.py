"""``model_args``: a knob is never taken for one of lm-eval's options, and nothing is ignored."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from eval.data import hub
from eval.lm_harness.arguments import HARNESS_OPTIONS, HarnessError, make_method, parse
from eval.lm_harness.config import make_config
from eval.records import TaskError

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")


def test_delta_is_the_methods_margin():
    parsed = parse({"pretrained": "smollm2_135m", "method": "ffd", "delta": 3, "max_length": 512, "device": "cpu"})
    assert parsed.method.knobs()["delta"] == 3
    assert parsed.options == {"max_length": 512}
    assert (parsed.spec.name, parsed.spec.path, parsed.spec.device) == ("smollm2_135m", None, "cpu")


def test_a_folder_is_found(tmp_path):
    parsed = parse({"pretrained": str(tmp_path)})
    assert (parsed.spec.name, parsed.spec.path) == (tmp_path.name, str(tmp_path))
    assert parsed.method.name == "ffd"


def test_a_hub_name_is_fetched_as_files(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "require", lambda repo, filename, **more: asked.append((repo, filename, more["revision"])))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **more: str(tmp_path))
    parsed = parse({"pretrained": "owner/name", "revision": "v1"})
    assert (parsed.spec.name, parsed.spec.path) == ("owner/name", str(tmp_path))
    assert asked == [("owner/name", "config.json", "v1")]


def test_a_hub_that_refuses_is_one_line(monkeypatch):
    def refuse(*arguments, **more):
        raise hub.HubRefusal("no answer")

    monkeypatch.setattr(hub, "require", refuse)
    with pytest.raises(HarnessError, match="pretrained=owner/name: no answer; or give a model folder"):
        parse({"pretrained": "owner/name"})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"method": "fdd"}, "method=fdd"),
        ({"delta": -1}, "delta=-1"),
        ({"delta": "x"}, "x"),
        ({"method": "quest", "delta": 7}, "delta=7"),
        ({"block_size": 100}, "block_size=100"),
        ({"block_sise": 128}, "block_sise=128"),
        ({"method": "dense", "token_budget": 64}, "token_budget=64"),
        ({"pretrained": "no-such-model"}, "pretrained=no-such-model"),
        ({"pretrained": None}, "pretrained=None"),
    ],
)
def test_bad_arguments_are_named_in_one_line(arguments, named):
    with pytest.raises(HarnessError) as caught:
        parse({"pretrained": "smollm2_135m", **arguments})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_option_of_lm_eval_is_swallowed():
    """Every argument of lm-eval's class is taken over, ours under the same name, or refused."""
    from lm_eval.models.huggingface import HFLM

    ours = {"pretrained", "revision", "dtype", "device", "batch_size", "max_batch_size", "trust_remote_code", "delta"}
    for name in inspect.signature(HFLM.__init__).parameters.keys() - {"self", "kwargs"} - ours - set(HARNESS_OPTIONS):
        with pytest.raises(HarnessError, match=name):
            make_method({name: True})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tasks", []),
        ("include_path", "/no/such/folder"),
        ("limit", 0),
        ("limit", 2.5),
        ("limit", "x"),
        ("limit", True),
        ("num_fewshot", -1),
        ("max_length", 0),
        ("apply_chat_template", 1),
        ("fewshot_as_multiturn", True),
        ("gen_kwargs", "max_gen_toks=3"),
        ("samples", 3),
    ],
)
def test_bad_task_keys_are_named(key, value):
    with pytest.raises(TaskError) as caught:
        make_config({"name": "lm_eval", "tasks": ["a"], key: value})
    assert str(caught.value).startswith(f"task.{key}={value}: expected ")


def test_tasks_may_be_a_string():
    assert make_config({"name": "lm_eval", "tasks": "a,b"}).tasks == ("a", "b")


def test_seeds_are_lm_evals_own_unless_given():
    assert make_config({"tasks": ["a"]}).seeds == (0, 1234, 1234, 1234)
    assert make_config({"tasks": ["a"], "seed": 3}).seeds == (3, 3, 3, 3)


def test_nothing_of_lm_eval_is_imported_before_it_is_used():
    code = (
        "import sys, experiments.main, experiments.config, eval.lm_harness.arguments, eval.lm_harness.config, "
        "eval.lm_harness.tasks, eval.lm_harness.results; print('lm_eval' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
