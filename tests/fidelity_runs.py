"""Small runs of the runners that study a method, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ruler_tokenizer import build
from tests.tiny import tiny_model

SMALL_FFD = ["method.block_size=64", "method.sub_block=16", "method.n_sink=4", "method.n_local=16"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny model with RULER's test tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-study")
    tiny_model("llama", heads=4, kv_heads=2).save_pretrained(folder)
    build().save_pretrained(folder)
    return folder


def common(model: Path, out: Path, samples: int = 2, *, follows: bool = True) -> list[str]:
    """Arguments of every small run; ``follows`` is of those that follow dense attention's answer, and limit it."""
    return [
        f"model.path={model}",
        "task.length=512",
        "task.tasks=[niah_single_1]",
        f"task.samples={samples}",
        "tracker=none",
        f"out={out}",
        "fidelity.every=3",
        *(["fidelity.new_tokens=12"] if follows else []),
    ]


def the_run(out: Path, prefix: str = "") -> Path:
    """The only run below a folder whose name begins so."""
    (folder,) = (f for f in (out / "runs").iterdir() if f.name.startswith(prefix))
    return folder


def summary_of(folder: Path) -> dict[str, Any]:
    """Its stored summary."""
    return json.loads((folder / "summary.json").read_text())  # type: ignore[no-any-return]
