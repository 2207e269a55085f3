"""The table a run ends with."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from experiments.table import print_summary, status_line


def summary(task: dict[str, Any]) -> dict[str, Any]:
    return {
        "method": {"name": "dense"},
        "model": {"name": "tiny"},
        "task": task,
        "accuracy": {"average": None},
        "skipped": [],
        "notes": [],
        "sparsity": {"keep_io": None, "keep_head": None, "sparsity": None, "bytes_ratio": None},
        "reads_everything": True,
        "fidelity": {},
        "validity": {"executor": "fused", "graph": True, "sparse_steps": 0, "dense_steps": 0, "expected_steps": 0},
        "timing": {"prefill_s": None, "decode_tok_s": None},
        "status": "complete",
        "run_id": "run",
    }


@pytest.mark.parametrize(
    ("task", "title"),
    [
        ({"name": "ruler"}, "ruler · tiny · dense"),
        ({"name": "longbench", "profile": "official"}, "longbench · tiny · dense"),
        ({"name": "longbench", "profile": "ffd_paper"}, "longbench, profile ffd_paper · tiny · dense"),
    ],
)
def test_the_title_names_a_profile_that_is_not_the_official_one(task: dict[str, Any], title: str) -> None:
    text = io.StringIO()
    print_summary(summary(task), Console(file=text, width=120))
    assert text.getvalue().splitlines()[0].strip() == title


@pytest.mark.parametrize(
    ("laws", "said"),
    [
        ({}, ""),
        ({"laws_broken": 0}, ""),
        ({"laws_broken": 1}, " · 1 law broken"),
        ({"laws_broken": 2}, " · 2 laws broken"),
    ],
)
def test_the_status_line_counts_broken_laws(laws: dict[str, int], said: str) -> None:
    """Most laws label a run and leave it complete; the label once was above its status alone."""
    assert status_line({**summary({"name": "ruler"}), **laws}) == f"status complete{said} · run run"
