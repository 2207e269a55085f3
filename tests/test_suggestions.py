"""The one line for a key that there is not, and for values that need a flag."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from experiments.errors import UsageError, as_typed, hydra_line
from experiments.jobs import plan
from experiments.keys import CONF


@pytest.fixture(autouse=True)
def hydra():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


UNKNOWN = [
    (["every=8"], "every=8: there is no key every; did you mean fidelity.every=8?"),
    (
        ["token_budget=3"],
        "token_budget=3: there is no key token_budget; did you mean method.token_budget=3 "
        "(with method=component, quest, topk or twilight)?",
    ),
    (
        ["method=quest", "token_budget=3"],
        "token_budget=3: there is no key token_budget; did you mean method.token_budget=3?",
    ),
    (["task.lenght=2000"], "task.lenght=2000: there is no key task.lenght; did you mean task.length=2000?"),
    (["lenght=2000"], "lenght=2000: there is no key lenght; did you mean task.length=2000?"),
    (["methd=ffd"], "methd=ffd: there is no key methd; did you mean method=ffd?"),
    (["samples=3"], "samples=3: there is no key samples; did you mean task.samples=3 or match.samples=3?"),
    (["experiments=qwen"], "experiments=qwen: there is no key experiments; did you mean experiment=qwen?"),
    (
        ["method=dense", "method.page_size=16"],
        "method.page_size=16: there is no key method.page_size; it is a key of method=quest or twilight",
    ),
    (["bench.foo=1"], "bench.foo=1: there is no key bench.foo; see python run.py --help and conf/"),
]


@pytest.mark.parametrize(("overrides", "said"), UNKNOWN, ids=[" ".join(o) for o, _ in UNKNOWN])
def test_an_unknown_key_names_the_one_that_was_meant(overrides, said):
    with pytest.raises(HydraException) as caught:
        compose("config", overrides=overrides)
    assert hydra_line(caught.value, overrides) == said


@pytest.mark.parametrize(
    ("overrides", "meant"),
    [
        (["method=ffd,quest", "method.blok_size=64"], "did you mean method.block_size=64?"),
        (["method=dense,ffd", "method.page_size=64"], "it is a key of method=quest or twilight"),
    ],
)
def test_a_sweep_says_it_too(overrides, meant):
    with pytest.raises(UsageError) as caught:
        plan([overrides])
    assert str(caught.value).endswith(f"; {meant}")


@pytest.mark.parametrize(
    ("typed", "list_too"), [("method=dense,ffd", ""), ("delta=3,5", "; as one list it is delta=[3,5]")]
)
def test_several_values_without_the_flag(typed, list_too):
    # Hydra's own text advises on quotes and --multirun in four lines
    error = HydraException(f"Ambiguous value for argument '{typed}'\n1. To use it as a list, use key=[value1,value2]")
    said = f"{typed}: several values are run one by one with -m (python run.py -m {typed}){list_too}"
    assert hydra_line(error, [typed]) == said


def test_a_knob_is_named_by_the_key_that_was_typed():
    said = "delta=-1: expected a number >= 0"
    assert as_typed(said, {"delta": None}) == f"method.{said}"
    assert as_typed(said, {"delta": -1}) == said
    assert as_typed("method=quick: expected one of dense", {}) == "method=quick: expected one of dense"
