"""``python -m eval.lm_harness``: lm-eval's own command line, offline, with a local task."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from eval.lm_harness.__main__ import main
from tests.lm_harness_data import leave_out_builtin_tasks, write_model, write_tasks


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def invoke(model_folder, task_folder, monkeypatch):
    """Run the command line in this process with the tiny model and tasks; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["eval.lm_harness"])

    def run(model_args, *more, tasks="tiny_generate,tiny_choice", model="ffd"):
        return main(
            ["--model", model, "--model_args", f"pretrained={model_folder},{model_args}",
             "--tasks", tasks, "--include_path", str(task_folder), *more]
        )  # fmt: skip

    return run


@pytest.fixture
def quick(monkeypatch):
    leave_out_builtin_tasks(monkeypatch)


def test_both_kinds_of_task_run(invoke, tmp_path, capsys):
    assert invoke("method=topk,token_budget=8", "--output_path", str(tmp_path), "--log_samples") == 0
    printed = capsys.readouterr().out
    assert "tiny_generate" in printed
    assert "tiny_choice" in printed
    (path,) = tmp_path.rglob("results_*.json")
    stored = json.loads(path.read_text())
    assert stored["n-samples"]["tiny_generate"]["effective"] == 4
    found = stored["config"]["sparse_decode"]
    assert (found["method"], found["knobs"]["token_budget"]) == ("topk", 8)
    assert found["generate_until"]["requests"] == 4
    assert found["generate_until"]["sparse_steps"] == found["generate_until"]["expected_steps"] > 0
    assert found["generate_until"]["keep_io"] < 0.3
    assert found["loglikelihood"]["requests"] == 8


@pytest.mark.usefixtures("quick")
def test_the_dense_method_equals_the_stock_model(invoke, tmp_path):
    values = {}
    for name, arguments, model in (("ours", "method=dense", "ffd"), ("stock", "dtype=float32", "hf")):
        more = ("--output_path", str(tmp_path / name), "--log_samples", "--device", "cpu")
        assert invoke(arguments, *more, model=model) == 0
        (path,) = (tmp_path / name).rglob("samples_tiny_generate*.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        values[name] = {row["doc_id"]: row["resps"] for row in rows}
    assert values["ours"] == values["stock"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("model_args", "more", "named"),
    [
        ("method=fdd", (), "method=fdd"),
        ("method=ffd,delta=-2", (), "delta=-2"),
        ("method=ffd,detla=2", (), "detla=2"),
        ("method=dense,peft=adapter", (), "peft=adapter"),
        ("method=dense,dtype=int3", (), "int3"),
        ("method=dense", ("--batch_size", "4"), "batch_size=4"),
        ("method=dense", ("--device", "cuda:7"), "cuda:7"),
        ("method=dense", ("--use_cache", "answers"), "use_cache"),
        ("method=dense,executor=fast", (), "executor=fast"),
    ],
)
def test_bad_input_is_one_line(invoke, capsys, model_args, more, named):
    assert invoke(model_args, *more) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert named in line


@pytest.mark.usefixtures("quick")
def test_an_unknown_task_is_one_line(invoke, capsys):
    assert invoke("method=dense", tasks="tiny_nothing") == 2
    assert "error: Tasks not found: tiny_nothing" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_a_yaml_configuration_is_checked_too(model_folder, task_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eval.lm_harness"])
    file = tmp_path / "evaluation.yaml"
    file.write_text(
        f"model: ffd\nmodel_args: {{pretrained: {model_folder}, method: dense}}\n"
        f"tasks: [tiny_choice]\ninclude_path: {task_folder}\nuse_cache: answers\n"
    )
    assert main(["run", "--config", str(file)]) == 2
    assert "use_cache" in capsys.readouterr().err
