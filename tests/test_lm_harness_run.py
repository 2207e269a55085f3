"""``python run.py task=lm_eval``: what a run leaves, how it resumes, how it fails."""

from __future__ import annotations

import json
import math
import shutil

import pytest

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from transformers import AutoModelForCausalLM

from eval.lm_harness.model import SparseDecodeLM
from tests.lm_harness_data import LAYERS, leave_out_builtin_tasks, write_model, write_tasks
from tests.run_in_process import invoke, only_run

SAMPLE_KEYS = {
    "task", "index", "prompt_fingerprint", "bos_count", "truncated", "prediction", "references", "score",
    "prompt_tokens", "new_tokens", "seconds", "ledger",
}  # fmt: skip
SUMMARY_KEYS = {
    "run_id", "status", "method", "model", "task", "accuracy", "sparsity", "fidelity", "validity", "timing",
    "environment",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    leave_out_builtin_tasks(monkeypatch)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def task_folder(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    return write_tasks(folder)


@pytest.fixture
def command(model_folder, task_folder, tmp_path):
    """Arguments of a small run whose results go to a fresh folder."""
    return [
        f"model.path={model_folder}",
        "task=lm_eval",
        "task.tasks=[tiny_generate,tiny_choice]",
        f"task.include_path={task_folder}",
        "tracker=none",
        "method=topk",
        "method.token_budget=8",
        f"out={tmp_path}/out",
    ]


def rows(folder, name="samples.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def comparable(lines):
    """Rows without what differs from run to run by nature."""
    return [{k: v for k, v in line.items() if k not in ("seconds", "timing")} for line in lines]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_run_leaves_what_it_promises(command, tmp_path, monkeypatch, capsys):
    assert invoke(command, monkeypatch) == 0
    folder = only_run(tmp_path)
    stored, samples = summary(folder), rows(folder)
    assert stored["status"] == "complete"
    assert stored.keys() >= SUMMARY_KEYS
    assert [(r["task"], r["index"]) for r in samples] == [("tiny_generate", i) for i in range(4)]
    assert all(r.keys() >= SAMPLE_KEYS for r in samples)
    steps = sum((r["new_tokens"] - 1) * LAYERS for r in samples)
    assert stored["validity"]["sparse_steps"] == stored["validity"]["expected_steps"] == steps > 0
    assert stored["sparsity"]["keep_io"] < 0.3
    assert "prefill not counted" in stored["counted"]
    generate, choice = stored["accuracy"]["tiny_generate"], stored["accuracy"]["tiny_choice"]
    assert (generate["path"], generate["metric"], generate["n"]) == ("decode by the method", "exact_match", 4)
    assert (choice["path"], choice["metric"], choice["n"]) == ("dense prefill", "acc", 4)
    assert generate["score"] == sum(r["score"] for r in samples) / 4
    scored = rows(folder, "loglikelihood.jsonl")
    assert choice["score"] == sum(r["score"] for r in scored) / 4
    assert all(len(r["loglikelihoods"]) == 2 for r in scored)
    assert "tiny_choice" in stored["validity"]["note"]
    printed = capsys.readouterr().out
    assert "tiny_choice: 8 loglikelihood requests by dense prefill; not a score of topk" in printed
    lm_evals_own = json.loads((folder / "lm_eval.json").read_text())["results"]
    assert lm_evals_own["tiny_choice"]["acc,none"] == choice["score"]


def test_every_null_has_its_reason(command, tmp_path, monkeypatch):
    assert invoke(command, monkeypatch) == 0
    stored = summary(only_run(tmp_path))

    def nulls(value, prefix=""):
        for key, item in value.items():
            name = f"{prefix}{key}"
            if isinstance(item, dict):
                yield from nulls(item, name + ".")
            elif item is None:
                yield name

    for block in ("accuracy", "sparsity", "fidelity", "validity", "timing"):
        for name in nulls(stored[block], f"{block}."):
            assert name in stored["null_reasons"]


def test_scoring_alone_is_no_score_of_the_method(command, tmp_path, monkeypatch):
    assert invoke([*command, "task.tasks=[tiny_choice]"], monkeypatch) == 0
    folder = only_run(tmp_path)
    stored = summary(folder)
    assert stored["status"] == "complete"
    assert stored["validity"]["sparse_steps"] == stored["validity"]["expected_steps"] == 0
    assert stored["validity"]["dense_prefill_tasks"] == ["tiny_choice"]
    assert stored["sparsity"]["keep_io"] is None
    assert stored["null_reasons"]["sparsity.keep_io"] == "no decode step was run"
    assert not (folder / "samples.jsonl").exists()
    # Whatever the method, the score is the model's own.
    assert invoke([*command[:5], "method=dense", command[-1], "task.tasks=[tiny_choice]"], monkeypatch) == 0
    other = next(f for f in (tmp_path / "out" / "runs").iterdir() if f != folder)
    assert rows(other, "loglikelihood.jsonl") == rows(folder, "loglikelihood.jsonl")


@pytest.mark.parametrize(
    ("task", "reason"),
    [("generate", "4 of 4 samples: a prediction was not finite"), ("choice", "8 loglikelihoods are not finite")],
)
def test_logits_that_are_not_finite_make_a_run_invalid(command, task, reason, model_folder, tmp_path, monkeypatch):
    """Once the run was complete: stock generate and a multiple choice take some token or option among NaN."""
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    model = AutoModelForCausalLM.from_pretrained(broken)
    model.lm_head.weight.data[9] = math.nan
    model.save_pretrained(broken)
    command[0] = f"model.path={broken}"
    assert invoke([*command, f"task.tasks=[tiny_{task}]"], monkeypatch) == 3
    folder = only_run(tmp_path)
    assert (summary(folder)["status"], summary(folder)["reason"]) == ("invalid", reason)
    if task == "generate":
        assert [row["finite"] for row in rows(folder)] == [False] * 4
        assert invoke([*command, f"task.tasks=[tiny_{task}]"], monkeypatch) == 3  # from finished answers


def test_an_interrupted_run_resumes(command, tmp_path, monkeypatch, capsys):
    assert invoke(command, monkeypatch) == 0
    whole = only_run(tmp_path)
    expected, name = rows(whole), whole.name
    shutil.rmtree(tmp_path / "out")

    answer, asked = SparseDecodeLM._answer, []

    def interrupted(self, request, task, index):
        asked.append(index)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return answer(self, request, task, index)

    monkeypatch.setattr(SparseDecodeLM, "_answer", interrupted)
    assert invoke(command, monkeypatch) == 130
    folder = only_run(tmp_path)
    assert summary(folder)["status"] == "partial"
    assert [r["score"] for r in rows(folder)] == [None, None]
    capsys.readouterr()
    assert invoke(command, monkeypatch) == 0
    assert asked == [0, 1, 2, 2, 3]
    assert only_run(tmp_path).name == name
    assert summary(folder)["status"] == "complete"
    assert comparable(rows(folder)) == comparable(expected)


def test_a_finished_run_is_only_shown(command, tmp_path, monkeypatch, capsys):
    assert invoke(command, monkeypatch) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(SparseDecodeLM, "__init__", None)
    assert invoke(command, monkeypatch) == 0
    assert capsys.readouterr().out == first


def test_another_method_or_document_is_another_run(command, task_folder, tmp_path, monkeypatch):
    assert invoke(command, monkeypatch) == 0
    assert invoke([*command, "method.token_budget=9"], monkeypatch) == 0
    file = task_folder / "documents.json"
    file.write_text(file.read_text().replace('"label": 1', '"label": 0'))  # a target: no prompt changes
    assert invoke(command, monkeypatch) == 0
    assert invoke([*command, "task.num_fewshot=1"], monkeypatch) == 0
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 4


def test_limits_and_options_reach_lm_eval(command, tmp_path, monkeypatch):
    assert invoke([*command, "task.limit=2", "task.gen_kwargs={max_gen_toks: 3, until: [zz]}"], monkeypatch) == 0
    samples = rows(only_run(tmp_path))
    assert [r["new_tokens"] for r in samples] == [3, 3]


def test_an_infinite_margin_keeps_everything(command, tmp_path, monkeypatch):
    command[5:7] = ["method=ffd", "delta=inf"]
    assert invoke([*command, "task.limit=1", "task.tasks=[tiny_generate]"], monkeypatch) == 0
    assert summary(only_run(tmp_path))["sparsity"]["keep_io"] == 1


def test_a_dry_run_leaves_nothing(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(SparseDecodeLM, "__init__", None)
    assert invoke([*command, "dry_run=true"], monkeypatch) == 0
    assert "12 samples to run" in capsys.readouterr().err
    assert list((tmp_path / "out" / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["task.tasks=null"], "task.tasks"),
        (["task.tasks=[tiny_nothing]"], "tiny_nothing"),
        (["task.include_path=/no/such/folder"], "/no/such/folder"),
        (["task.limit=0"], "task.limit=0"),
        (["task.gen_kwargs={num_beams: 2}"], "num_beams=2"),
        (["task.gen_kwargs={max_gen_toks: 5000}"], "max_gen_toks=5000"),
        (["runner=prompts"], "runner=prompts"),
        (["engine.graph=true"], "engine.graph=true: expected auto or false with task=lm_eval"),
        (["shard=1/2"], "shard=1/2"),
        (["match.keep_io=0.5"], "error: match.keep_io=0.5: expected null with "),  # was match.target=keep_io
        (["method.token_budget=0"], "token_budget=0"),
        (["delta=3"], "delta=3"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(command, tmp_path, monkeypatch, capsys, arguments, named):
    assert invoke([*command, *arguments], monkeypatch) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert named in line
    runs = tmp_path / "out" / "runs"
    assert not runs.exists() or list(runs.iterdir()) == []


def test_missing_data_is_one_line(command, task_folder, monkeypatch, capsys):
    (task_folder / "documents.json").unlink()
    assert invoke(command, monkeypatch) == 2
    error = capsys.readouterr().err
    assert "error: task.tasks=tiny_generate,tiny_choice: cannot be loaded" in error
    assert "check the network and the login there, or the files that the YAML names" in error
