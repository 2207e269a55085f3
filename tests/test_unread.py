"""Keys that the chosen runner does not read are refused where they have not their default."""

from __future__ import annotations

import pytest
import yaml

from experiments import unread
from experiments.keys import CONF
from tests.run_in_process import invoke

REFUSED = [
    (
        ["runner=accuracy", "fidelity.text_file=/nope"],
        "fidelity.text_file=/nope: runner=accuracy does not read it; only ",
    ),
    (["runner=prompts", "fidelity.new_tokens=8"], "fidelity.new_tokens=8: runner=prompts does not read it; only "),
    (["runner=throughput", "fidelity.text_file=a"], "fidelity.text_file=a: runner=throughput does not read it; only "),
    (["runner=kernel", "calibrate.value=0.5"], "calibrate.value=0.5: runner=kernel does not read it; only "),
    (["runner=fidelity", "calibrate.per=layer"], "calibrate.per=layer: runner=fidelity does not read it; only "),
    (["runner=accuracy", "bench.T=512"], "bench.T=512: runner=accuracy does not read it; only "),
    (["runner=kernel", "bench.geometry=toy"], "bench.geometry=toy: runner=kernel does not read it; only "),
    (["runner=throughput", "bench.G=[1,2]"], "bench.G=[1,2]: runner=throughput does not read it; only "),
    (["runner=fidelity", "fidelity.traces=t"], "fidelity.traces=t: runner=fidelity does not read it; only "),
    (["runner=fidelity", "~fidelity.sweep.topp"], "fidelity.sweep: runner=fidelity does not read it; only "),
    (["runner=calibrate", "fidelity.layers=[1]"], "fidelity.layers=[1]: runner=calibrate does not read it; only "),
    (
        ["runner=fidelity", "trace=replay", "fidelity.text_file=a"],
        "fidelity.text_file=a: runner=fidelity trace=replay does not read it; only ",
    ),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_a_key_that_the_runner_does_not_read_is_refused(arguments, said, tmp_path, monkeypatch, capsys):
    """Once it was passed over, and the run was not what its command line said."""
    assert invoke([*arguments, f"out={tmp_path}", "dry_run=true"], monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1


def composed(**changed):
    """A configuration with its defaults; keys as ``group__name``."""
    values = yaml.safe_load((CONF / "config.yaml").read_text())
    for key, value in changed.items():
        group, _, name = key.partition("__")
        if name:
            values[group][name] = value
        else:
            values[group] = value
    return values


@pytest.mark.parametrize(
    "changed",
    [
        *({"runner": runner, "fidelity__every": 0} for runner in ("accuracy", "prompts", "kernel", "throughput")),
        {"runner": "accuracy", "bench__T": None, "calibrate__value": 0.95},
        {"runner": "fidelity", "fidelity__text_file": "a"},
        {"runner": "calibrate", "fidelity__text_file": "a", "calibrate__value": 0.5},
        {"runner": "accuracy", "match__keep_io": 0.25, "fidelity__new_tokens": 8},
        {"runner": "fidelity", "trace": "record", "fidelity__layers": [0], "fidelity__prompts": 1},
        {"runner": "fidelity", "trace": "replay", "fidelity__traces": "t", "fidelity__sweep": {}},
        {"runner": "kernel", "bench__G": [1], "bench__T": 512},
        {"runner": "throughput", "bench__geometry": "toy", "bench__kept": 0.2},
    ],
)
def test_a_key_that_is_read_or_unchanged_is_not(changed):
    unread.refuse_unread(composed(**changed))


def test_every_key_of_these_groups_has_readers():
    """A key that is added to conf/ without them would be passed over again."""
    listed = sorted(f"{entry.group}.{name}" for entry in unread._TABLE for name in entry.names)
    values = composed()
    known = sorted(f"{group}.{name}" for group in ("fidelity", "calibrate", "bench") for name in values[group])
    assert sorted([*listed, "fidelity.every"]) == known
