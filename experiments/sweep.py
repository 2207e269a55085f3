"""``python run.py -m ...`` and ``python run.py experiment=NAME``: many runs, one table at the end."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.errors import FAILED_EXIT, INTERRUPTED_EXIT, UsageError
from experiments.files import held_alone
from experiments.job import Outcome
from experiments.jobs import Job, dropped_lines, plan
from experiments.keys import CONF
from experiments.launch import launch_by_hydra, launch_here
from experiments.recipes import ALL, Recipe, load_recipe, names
from experiments.sweep_record import folder_of, is_plan, names_runs, write_record
from experiments.sweep_table import print_sweep

_FLAGS = ("-m", "--multirun")


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for more than one run."""
    return any(a in _FLAGS or a.startswith(("experiment=", "size=")) for a in arguments)


def run_sweep(arguments: Sequence[str]) -> int:
    """Run a sweep or recipes; returns the exit code: that a job failed, or 0."""
    from hydra import initialize_config_dir

    rest = [a for a in arguments if a not in _FLAGS]
    experiment, rest = _take(rest, "experiment")
    size, rest = _take(rest, "size")
    if experiment is None:
        if size is not None:
            raise UsageError(f"size={size}: is a key of recipes (experiment=NAME)")
        name = "sweep-" + hashlib.sha256("\n".join(rest).encode()).hexdigest()[:8]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return Sweep(name, None, [rest]).run()
    codes = []
    for chosen in names() if experiment == ALL else [experiment]:
        recipe = load_recipe(chosen, size or "small")
        with initialize_config_dir(str(CONF), version_base="1.3"):
            codes.append(_sweep_of(recipe, rest).run())
        if codes[-1] == INTERRUPTED_EXIT:
            break
    return max(codes)


def _sweep_of(recipe: Recipe, arguments: Sequence[str]) -> Sweep:
    launcher = [a for a in arguments if _is_launcher(a)]
    own = [a for a in arguments if not _is_launcher(a)]
    # The user's arguments come last and win over the recipe's.
    sweeps = [[*line, *own, *launcher] for line in recipe.sweeps]
    if recipe.random and not recipe.skip:
        from experiments.random_model import random_model

        out, _ = _take(own, "out")
        folder = random_model(recipe.random, Path(out or "outputs") / "models")
        sweeps = [[f"model.path={folder}" if a == "model.path=RANDOM" else a for a in line] for line in sweeps]
    return Sweep(f"{recipe.name}-{recipe.size}", recipe, sweeps)


class Sweep:
    """Jobs on their way to a record under ``outputs/sweeps`` and a table.

    Parameters
    ----------
    name
        Of the record.
    recipe
        The recipe it comes from, if any.
    sweeps
        Command lines, each possibly sweeping, without flags.
    """

    def __init__(self, name: str, recipe: Recipe | None, sweeps: Sequence[Sequence[str]]) -> None:
        self.name, self.recipe = name, recipe
        self.launcher = list(dict.fromkeys(a for line in sweeps for a in line if _is_launcher(a)))
        out, _ = _take(sweeps[0], "out")
        self.root = Path(out or "outputs")
        self.folder = folder_of(self.root, name, plan=is_plan(sweeps))
        lines = [[a for a in line if not _is_launcher(a)] for line in sweeps]
        self.jobs = [Job(tuple(line)) for line in lines] if recipe and recipe.skip else plan(lines)
        # Unless it was run, a job's outcome is that it was not.
        skipped = Outcome("skipped", recipe.skip) if recipe and recipe.skip else None
        self.outcomes = [skipped or Outcome("missing", "not run yet")] * len(self.jobs)
        self.started = time.monotonic()

    def run(self) -> int:
        """Run all jobs and print the table; returns the exit code."""
        if not (self.recipe and self.recipe.skip):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"out={self.root}: cannot be written ({error.strerror})") from None
            # Two would write each other's logs, and take each other's failures for their own.
            with held_alone(self.folder / ".lock", f"{self.name} in out={self.root}"):
                return self._run()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if not names_runs(self.folder.with_suffix(".json")):
            self._record()
        return self._end()

    def _run(self) -> int:
        try:
            self._record()
        except OSError as error:
            raise UsageError(f"out={self.root}: cannot be written ({error.strerror})") from None
        logs = f"what each plans and prints: {self.folder / 'job-000.log'} and on"
        print("\n".join([f"{self.name}: {len(self.jobs)} jobs; {logs}", *dropped_lines(self.jobs)]), flush=True)
        try:
            self._launch()
        except KeyboardInterrupt:
            self._record()
            print_sweep(self.name, self.jobs, self.outcomes, self.root)
            return INTERRUPTED_EXIT
        self._record()
        return self._end()

    def _end(self) -> int:
        print_sweep(self.name, self.jobs, self.outcomes, self.root)
        return FAILED_EXIT if any(o.status in ("failed", "missing") for o in self.outcomes) else 0

    def _launch(self) -> None:
        stems = [self.folder / f"job-{i:03d}" for i in range(len(self.jobs))]
        if self.launcher:
            launch_by_hydra(self.jobs, self.root, stems, self._report, self.launcher)
        else:
            launch_here(self.jobs, self.root, stems, self._report)

    def _report(self, position: int, outcome: Outcome) -> None:
        self.outcomes[position] = outcome
        done = sum(o.status != "missing" for o in self.outcomes)
        why = f": {outcome.reason}" if outcome.reason else ""
        seconds = time.monotonic() - self.started
        command = " ".join(self.jobs[position].overrides)
        print(f"[{done}/{len(self.jobs)}, {seconds:.0f} s] {command}: {outcome.status}{why}", flush=True)
        self._record()

    def _record(self) -> None:
        write_record(self.folder.with_suffix(".json"), self.name, self.recipe, self.jobs, self.outcomes)


def _is_launcher(argument: str) -> bool:
    return argument.lstrip("+").startswith(("hydra/", "hydra."))


def _take(arguments: Sequence[str], key: str) -> tuple[str | None, list[str]]:
    """Value of the last ``key=value``, and the arguments without it (``out`` stays with the jobs)."""
    values = [a.partition("=")[2] for a in arguments if a.startswith(f"{key}=")]
    rest = [a for a in arguments if not a.startswith(f"{key}=")]
    return (values[-1] if values else None), rest
