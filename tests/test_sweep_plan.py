"""What a sweep's command line means: combinations, dropped knobs, equal jobs, refusals, recipes."""

from __future__ import annotations

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from experiments import recipes
from experiments.errors import UsageError
from experiments.jobs import dropped_lines, plan
from experiments.keys import CONF
from experiments.sweep import is_sweep, run_sweep


@pytest.fixture(autouse=True)
def composing():
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def lines(*arguments):
    return [" ".join(job.overrides) for job in plan([arguments])]


def test_every_combination_in_order():
    assert lines("method=ffd", "delta=3,5", "task.length=4096,8192") == [
        "method=ffd delta=3 task.length=4096",
        "method=ffd delta=3 task.length=8192",
        "method=ffd delta=5 task.length=4096",
        "method=ffd delta=5 task.length=8192",
    ]


def test_values_are_written_as_a_command_line_has_them():
    assert lines("engine.fuse=true,false") == ["engine.fuse=true", "engine.fuse=false"]  # were True and False
    listed = lines("runner=throughput", "engine.fuse=[auto,true],[false]", "task.template='True',null")
    assert [line.split()[1:] for line in listed] == [
        [fuse, template]
        for fuse in ("engine.fuse=[auto,true]", "engine.fuse=[false]")
        for template in ("task.template='True'", "task.template=null")
    ]


def test_a_knob_is_dropped_for_methods_without_it_and_equal_jobs_run_once():
    assert lines("method=dense,ffd,quest", "delta=3,5", "method.token_budget=512,1024", "seed=1") == [
        "method=dense seed=1",
        "method=ffd delta=3 seed=1",
        "method=ffd delta=5 seed=1",
        "method=quest method.token_budget=512 seed=1",
        "method=quest method.token_budget=1024 seed=1",
    ]


def test_what_was_dropped_is_recorded():
    (dense, _) = plan([["method=dense,ffd", "delta=3"]])
    assert dense.dropped == ("delta=3",)
    assert dropped_lines([dense]) == ["method=dense: runs without delta=3"]


def test_what_reads_everything_is_run_once_as_it_is_beside_matched_methods():
    jobs = plan([["method=dense,topk,kivi", "match.keep_io=0.2,0.3"]])
    assert [" ".join(job.overrides) for job in jobs] == [
        "method=dense",
        "method=topk match.keep_io=0.2",
        "method=topk match.keep_io=0.3",
        "method=kivi",
    ]
    assert dropped_lines(jobs) == [
        "method=dense: runs without match.keep_io=0.2",
        "method=kivi: runs without match.keep_io=0.2",
    ]
    assert lines("method=dense", "match.bytes_ratio=0.2") == ["method=dense"]
    # What a match is measured with goes with it; a runner that reads it anyway keeps it.
    measured = ("match.bytes_ratio=0.2", "fidelity.new_tokens=8")
    assert lines("method=dense", *measured) == ["method=dense"]
    assert lines("method=dense", "runner=fidelity", *measured) == ["method=dense runner=fidelity fidelity.new_tokens=8"]


def test_a_suite_has_its_own_knobs():
    assert lines("task=ruler,longbench", "task.length=4096") == ["task=ruler task.length=4096", "task=longbench"]


@pytest.mark.parametrize("second", ["method.delta=7", "delta=7.0", "method=ffd"])
def test_one_configuration_spelt_in_two_ways_is_one_job(second):
    assert len(plan([["delta=7"], [second]])) == 1


def test_lists_are_values_not_sweeps():
    assert lines("task.tasks=[vt,fwe]", "seed=1,2") == ["task.tasks=[vt,fwe] seed=1", "task.tasks=[vt,fwe] seed=2"]


def test_values_stay_as_typed(monkeypatch):
    monkeypatch.setenv("SOME_FOLDER", "/data")
    typed = ["task.data_dir=${oc.env:SOME_FOLDER}", "model.path='a,b'", "seed=1,2"]
    assert lines(*typed) == [" ".join([*typed[:2], f"seed={i}"]) for i in (1, 2)]


def test_shards_are_jobs_of_their_own():
    assert len(lines("shard=1/2,2/2")) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method=dense,quest", "delta=3"], "delta=3: no method of this sweep has a knob delta (dense, quest)"),
        (
            ["method=ffd,quest", "method.blok_size=64"],
            "method.blok_size=64: no method of this sweep has a knob blok_size",
        ),
        (["method=ffd,quick"], "method=quick: expected one of"),
        (["quick=1,2"], "quick=1: there is no key quick"),
        (["delta=[1,2"], "delta=[1,2"),
    ],
)
def test_what_no_job_can_use_is_refused_before_any_runs(arguments, message):
    with pytest.raises(UsageError) as caught:
        plan([arguments])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_that_only_some_jobs_accept_fails_there_alone():
    assert len(lines("method=ffd", "method.block_size=64,128", "method.sub_block=32,128")) == 4


@pytest.mark.parametrize("arguments", [["-m"], ["method=ffd", "--multirun"], ["experiment=ruler_32k"], ["size=smoke"]])
def test_sweeps_are_recognised(arguments):
    assert is_sweep(arguments)


def test_a_single_run_is_not_a_sweep():
    assert not is_sweep(["method=ffd", "delta=3", "task.tasks=[vt,fwe]"])


@pytest.mark.parametrize("size", recipes.SIZES)
@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_composes(name, size):
    recipe = recipes.load_recipe(name, size)
    assert recipe.sweeps
    if recipe.skip is None:
        assert plan(recipe.sweeps)


def test_a_recipe_for_a_gpu_says_what_runs_without_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert recipes.load_recipe("ruler_32k", "paper").skip == "needs a GPU; size=smoke runs without one"
    assert recipes.load_recipe("ruler_32k", "smoke").skip is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert recipes.load_recipe("ruler_32k", "paper").skip is None


def test_the_paper_is_covered():
    assert set(recipes.names()) >= {
        "kernel_latency", "throughput", "ruler_32k", "longbench", "retrieval_quality", "headwise", "selection",
        "component_speed", "component_accuracy", "qwen", "qwen_longbench", "sparsity_by_layer",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment=quick"], "experiment=quick: expected one of"),
        (["experiment=ruler_32k", "size=huge"], "size=huge: expected one of smoke, small, paper"),
        (["size=smoke"], "size=smoke: is a key of recipes"),
    ],
)
def test_recipes_that_are_not_there(arguments, message):
    GlobalHydra.instance().clear()
    with pytest.raises(UsageError) as caught:
        run_sweep(arguments)
    assert message in str(caught.value)


def test_random_models_are_made_once_alike_and_named_as_such(tmp_path):
    from eval.data import SourceUnavailable
    from experiments.random_model import random_model

    try:
        folder = random_model("qwen2", tmp_path / "a")
    except SourceUnavailable as error:
        pytest.skip(f"the embedded model's tokenizer is not here: {error}")
    assert folder.name == "random-qwen2"
    weights = folder / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert random_model("qwen2", tmp_path / "a") == folder
    assert weights.stat().st_mtime_ns == made
    again = random_model("qwen2", tmp_path / "b") / "model.safetensors"
    assert weights.read_bytes() == again.read_bytes()
    with pytest.raises(ValueError, match="random=gpt: expected one of llama, qwen2"):
        random_model("gpt", tmp_path)
