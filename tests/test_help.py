"""`python run.py --help`: every choice and key of conf/ with a phrase, on a screen or two, at once."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import run
from experiments import bench_config, config, options, recipes
from experiments.errors import UsageError
from experiments.help import help_page
from experiments.keys import CONF, GROUPS, annotated, known_keys, of_group
from experiments.keys import options as names_of

ROOT = Path(run.__file__).parent
CHOICES = {
    "runner": config.RUNNERS,
    "executor": config.EXECUTORS,
    "tracker": config.TRACKERS,
    "trace": options.TRACE_MODES,
    "calibrate.target": options.CALIBRATE_TARGETS,
    "calibrate.per": options.CALIBRATE_PER,
    "bench.dtype": bench_config.DTYPES,
    "bench.l2": bench_config.L2_STATES,
    "bench.timing": bench_config.TIMINGS,
    "bench.source": bench_config.SOURCES,
}


def test_help_is_short_and_answers_at_once():
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "run.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert time.monotonic() - began < 20  # 0.4 s; generous for a loaded machine, as torch alone takes longer than that
    assert not {"torch", "transformers"} & {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    lines = done.stdout.splitlines()
    assert len(lines) <= 100  # 177 lines of defaults without a word
    assert max(map(len, lines)) <= 130


def test_the_first_page_lists_every_choice():
    page = help_page(["--help"])
    words = page.replace(",", " ").replace(";", " ").split()
    for group in (*GROUPS, "experiment"):
        assert set(names_of(group)) <= set(words)
    assert set(recipes.SIZES) <= set(page.replace("size=", "").replace(",", " ").split())


@pytest.mark.parametrize("key", CHOICES)
def test_a_key_with_few_values_names_them_all(key):
    # runner=accuracy stood alone: its values were in the refusal of a wrong one only
    phrase = next(k.phrase for k in annotated(CONF / "config.yaml").keys if k.name == key)
    assert [value for value in CHOICES[key] if value not in phrase] == []


def test_every_key_is_explained():
    pages = [annotated(CONF / "config.yaml"), *(of_group(g, name) for g in GROUPS for name in names_of(g))]
    bare = [key.name for page in pages for key in page.keys if not key.phrase]
    assert [name for name in bare if not name.startswith("fidelity.sweep.")] == []


def test_every_choice_says_what_it_is():
    for group in (*GROUPS, "experiment"):
        assert [name for name in names_of(group) if not annotated(CONF / group / f"{name}.yaml").header] == []


def test_the_parser_finds_the_keys_that_yaml_finds():
    def flat(values, prefix=""):
        for name, value in values.items():
            yield prefix + name
            if isinstance(value, dict) and not (prefix + name).startswith("fidelity.sweep."):
                yield from flat(value, f"{prefix}{name}.")

    composed = yaml.safe_load((CONF / "config.yaml").read_text())
    top = {name: value for name, value in composed.items() if name not in ("defaults", "hydra")}
    found = {key.name: key.default for key in annotated(CONF / "config.yaml").keys}
    assert list(found) == list(flat(top))
    assert {key: yaml.safe_load(found[key]) for key in ("seed", "out", "bench.protocols")} == {
        "seed": top["seed"],
        "out": None,
        "bench.protocols": top["bench"]["protocols"],
    }
    for group in GROUPS:
        for name in names_of(group):
            own = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
            assert {f"{group}.{key}" for key in own} - {f"{group}.name"} <= set(known_keys())


def test_models_share_what_is_said_of_their_keys():
    assert len({of_group("model", name).keys for name in names_of("model")}) == 1


def test_other_choices_and_parts_are_a_word_away():
    assert "method.token_budget=1024" in help_page(["--help", "method=quest"])
    assert "bench.G=4" in help_page(["--help", "bench"])
    assert "bench.G=4" not in help_page(["--help"])
    quest = next(line for line in help_page(["--help", "method"]).splitlines() if "method=quest" in line)
    assert "budget" in quest


@pytest.mark.parametrize(
    ("asked", "said"),
    [("method=quick", "method=quick: expected one of component"), ("quick", "--help quick: expected")],
)
def test_what_there_is_no_help_for(asked, said):
    with pytest.raises(UsageError, match=said):
        help_page(["--help", asked])
