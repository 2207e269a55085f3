"""Named recipes: the sweeps behind each table and figure of the paper, at three sizes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from experiments.errors import UsageError
from experiments.gpus import visible_gpus
from experiments.keys import CONF

SIZES = ("smoke", "small", "paper")
ALL = "all"
_NO_GPU = "needs a GPU"


@dataclass(frozen=True)
class Recipe:
    """One file of ``conf/experiment`` at one size."""

    name: str
    size: str
    sweeps: tuple[tuple[str, ...], ...]
    """Command lines, each possibly sweeping."""
    random: str | None
    """Family of the random model that stands for ``model.path=RANDOM``."""
    skip: str | None
    """Why it cannot be run here."""


def names() -> list[str]:
    """All recipes."""
    return sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


def load_recipe(name: str, size: str) -> Recipe:
    """Read a recipe.

    Raises
    ------
    UsageError
        For a name or size that there is not.
    """
    import yaml

    if name not in names():
        raise UsageError(f"experiment={name}: expected one of {', '.join([*names(), ALL])}")
    if size not in SIZES:
        raise UsageError(f"size={size}: expected one of {', '.join(SIZES)}")
    recipe = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())
    own = recipe["sizes"][size]
    sweeps = tuple((*recipe.get("common", ()), *line.split()) for line in own["sweeps"])
    obstacle = _obstacle(own.get("needs"))
    if obstacle == _NO_GPU and recipe["sizes"]["smoke"].get("needs") != "gpu":
        obstacle += "; size=smoke runs without one"
    return Recipe(name, size, sweeps, own.get("random"), obstacle)


def _obstacle(needs: str | None) -> str | None:
    if needs == "gpu" and not visible_gpus():
        return _NO_GPU
    if needs == "longbench" and not _has_longbench():
        return "needs LongBench's data: python -m eval.data fetch longbench/data, or FFD_LONGBENCH=FOLDER"
    return None


def _has_longbench() -> bool:
    """Whether the smoke recipe finds LongBench: a folder of official files, or the official zip in the cache."""
    from eval.data import SOURCES
    from eval.data.store import is_cached

    return bool(os.environ.get("FFD_LONGBENCH")) or is_cached(SOURCES["longbench/data"])
