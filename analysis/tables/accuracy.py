"""Scores by task and method, and what separates each method from dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.cells import Cell, Table
from analysis.comparison import MARGIN, compare, verdict
from analysis.labels import label
from analysis.load import Outputs, Run
from analysis.pairing import PairingError
from analysis.published import Published, of_artifact, quotations
from analysis.stats import Result
from analysis.tables.sources import NOT_ASKED, Recipe, Source, recipe

_AVERAGES = {"average": "average", "macro": "macro (mean of categories)"}
_PUBLISHED_AVERAGES = ("avg", "avg over six categories")
"""Their settings; RULER's is the plain mean, LongBench's the mean of categories."""


def accuracy_tables(outputs: Outputs, size: str | None) -> list[Table]:
    """RULER, LongBench, Qwen and the component ablation, each with its paired statistics."""
    tables: list[Table] = []
    for name, experiment, suite, title, lines in (
        ("ruler_32k", "ruler_32k", "ruler", "RULER by task", of_artifact("ruler_32k")),
        ("longbench", "longbench", "longbench", "LongBench by category", of_artifact("longbench", model="llama")),
        ("qwen_ruler", "qwen", "ruler", "Qwen2.5: RULER", of_artifact("ruler", model="qwen")),
        ("qwen_longbench", "qwen_longbench", "longbench", "Qwen2.5: LongBench", of_artifact("longbench", model="qwen")),
        (
            "component_accuracy",
            "component_accuracy",
            "ruler",
            "Components: accuracy",
            of_artifact("component_accuracy"),
        ),
    ):
        left = recipe(outputs, experiment, size)
        tables.append(_scores(name, title, left, suite, lines))
        tables.append(_paired(name, title, left, suite))
    return tables


def _scores(name: str, title: str, left: Recipe, suite: str, lines: Sequence[Published]) -> Table:
    """Our methods and tasks, then those that only the paper has: a missing cell shows its number too."""
    own = left.of_task(suite)
    sources = [*own, *_only_published(lines, own)]
    tasks = dict.fromkeys(task for s in sources if s.run for task in _accuracy(s) if task != "average_partial")
    average = "macro" if suite == "longbench" else "average"
    for line in lines:
        if any(line.is_of(s.method) for s in sources):
            tasks.setdefault(average if line.setting in _PUBLISHED_AVERAGES else line.setting)
    if "average" in tasks:  # below all tasks, those included that only the paper has
        tasks["average"] = tasks.pop("average")
    rows = [(_AVERAGES.get(task, task), tuple(_score(source, task, lines) for source in sources)) for task in tasks]
    notes = quotations([p for p in lines if not any(p.is_of(s.method) for s in sources)])
    heading = left.heading if own else (f"not run: {left.problem or 'no job of this suite'}",)
    return Table(name, title, tuple(s.label for s in sources), tuple(rows), heading, notes)


def _only_published(lines: Sequence[Published], own: Sequence[Source]) -> list[Source]:
    """Columns of methods that the paper has a number of and we have no job of."""
    methods: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        method = line.as_method()
        if method is not None and not any(line.is_of(s.method) for s in own):
            methods.setdefault(label(method), method)
    return [Source(name, method, None, NOT_ASKED, None) for name, method in methods.items()]


def _accuracy(source: Source) -> Mapping[str, Any]:
    assert source.run is not None
    return source.run.summary.get("accuracy") or {}


def _score(source: Source, task: str, lines: Sequence[Published]) -> Cell:
    quoted = next((p for p in lines if p.is_of(source.method) and _is_task(p, task)), None)
    beside = {} if quoted is None else {"published": quoted.text, "source": quoted.source}
    if source.run is None:
        return source.cell(None, **beside)
    entry = _accuracy(source).get(task)
    if entry is None and task not in _accuracy(source):
        why = _unfinished(source.run, task)
        if why is None:
            return Cell(**beside)
        return source.cell(None, reason=f"{source.label}: {task}: {why}", marks=("missing",), **beside)
    if isinstance(entry, Mapping):
        interval = entry.get("ci95")
        bounds = None if interval is None else (float(interval[0]), float(interval[1]))
        return source.cell(entry["score"], interval=bounds, n=entry["n"], **beside)
    if entry is None:
        why = f"{source.label}: {task}: no task of this average was run"
        return source.cell(None, reason=why, marks=("missing",), **beside)
    partial = bool(_accuracy(source).get("average_partial"))
    n = (source.run.summary.get("average_samples") or {}).get(task)
    return source.cell(entry, n=n, marks=source.marks(partial_average=partial), **beside)


def _unfinished(run: Run, task: str) -> str | None:
    """Why a task that the run was asked for has no score; None where it was not asked for it."""
    for skipped in run.summary.get("skipped") or ():
        if isinstance(skipped, Mapping) and skipped.get("task") == task:
            return str(skipped.get("reason"))
    asked = (run.summary.get("task") or {}).get("tasks")
    if run.finished or (asked is not None and task not in asked):
        return None
    return run.reason or run.status


def _is_task(line: Published, task: str) -> bool:
    return (
        line.setting == task
        or (task in _AVERAGES and line.setting in _PUBLISHED_AVERAGES)
        or (task == "macro" and line.setting == "avg")
    )


def _paired(name: str, title: str, left: Recipe, suite: str) -> Table:
    """Each method against dense over the same prompts."""
    columns = ("difference", "p", "p (Holm)", f"p of a loss of {MARGIN:g} or more", "detectable")
    sources = left.of_task(suite)
    dense = next((s.run for s in sources if s.run is not None and s.method["name"] == "dense"), None)
    rows: list[tuple[str, tuple[Cell, ...]]] = []
    notes: list[str] = []
    if dense is None:
        notes.append("no dense run to compare with")
    for source in sources:
        if dense is None or source.run is None or source.run is dense:
            continue
        try:
            compared = compare(dense, source.run)
        except PairingError as error:
            notes.append(f"{source.label}: not compared: {error}")
            continue
        ids = (dense.run_id, source.run.run_id)
        for row in compared.rows:
            rows.append(
                (
                    f"{source.label}, {row.task}",
                    (
                        Cell(row.difference, interval=row.interval, n=row.n, run_ids=ids, reason=row.interval_reason),
                        _p(row.p, ids),
                        Cell(row.p_holm, 3, run_ids=ids, reason=None if row.p_holm is not None else row.p.method),
                        _p(row.within_margin, ids),
                        _p(row.detectable, ids, digits=2),
                    ),
                )
            )
        last = compared.rows[-1]
        notes.append(f"{source.label}: {verdict(last, MARGIN, 'dense')} ({last.task}, n = {last.n})")
        notes.extend(f"{source.label}: {note}" for note in compared.notes)
    return Table(
        f"{name}_paired", f"{title}: against dense, same prompts", columns, tuple(rows), left.heading, tuple(notes)
    )


def _p(result: Result, ids: tuple[str, ...], digits: int = 3) -> Cell:
    return Cell(result.value, digits, run_ids=ids, reason=result.method if result.value is None else None)
