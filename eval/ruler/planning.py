"""Which RULER tasks a run can have: data at hand, length large enough, official or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval import data
from eval.records import Plan, Skipped, TaskError, reasons
from eval.ruler.essays import REPOSITORY_WORDS
from eval.ruler.fitting import DoesNotFit
from eval.ruler.generation import make_generator
from eval.ruler.tasks import TASKS, QuestionTask

if TYPE_CHECKING:
    from eval.ruler.suite import RulerSuite

OFFICIAL_SEED = 42


def make_plan(suite: RulerSuite) -> Plan:
    """Plan of a suite.

    A task is taken when a probe of a few steps' size fits the length. Where the length is too
    small for that, its samples are generated (they are short, and cached), since only the official
    procedure itself tells whether each of them ends.

    Raises
    ------
    TaskError
        A named task, or every task, is too small or lacks its data; more samples than questions.
    """
    config = suite.config
    skipped = [skip for task in config.selected if (skip := _skip(suite, task)) is not None]
    for skip in skipped:
        if config.tasks is not None and not skip.source_missing:
            raise TaskError(
                f"task.length={config.length}: too small for {skip.task}, named in task.tasks: {skip.reason}"
            )
    out = {skip.task for skip in skipped}
    tasks = tuple(task for task in config.selected if task not in out)
    if not tasks:
        _refuse(config.length, skipped)
    notes, official = _provenance(suite, tasks)
    return Plan(
        tasks,
        dict.fromkeys(tasks, config.samples),
        tuple(skipped),
        covers_benchmark=len(tasks) == len(TASKS),
        official=official,
        notes=tuple(notes),
    )


def _refuse(length: int, skipped: list[Skipped]) -> None:
    too_small = [skip for skip in skipped if not skip.source_missing]
    if too_small:
        example = f"{too_small[0].task}: {too_small[0].reason}"
        raise TaskError(f"task.length={length}: too small for every task, for example {example}")
    raise TaskError(f"no RULER task can run: {reasons(skipped)}")


def _skip(suite: RulerSuite, name: str) -> Skipped | None:
    """Why a task cannot run, or None."""
    task = TASKS[name]
    try:
        for source in task.sources:
            suite.sources.locate(source)
        if suite.is_generated(name):
            return None
        if isinstance(task.kind, QuestionTask):
            available = len(suite.sources.questions(task.kind).questions)
            if suite.config.samples > available:
                raise TaskError(
                    f"task.samples={suite.config.samples}: {name} has {available} questions; accepted: 1 to {available}"
                )
        if not make_generator(task, suite.setting(name), suite.sources).surely_fits():
            suite.rows(name)
    except data.SourceUnavailable as error:
        return Skipped(name, f"data cannot be had: {error}", source_missing=True)
    except DoesNotFit as reason:
        return Skipped(name, f"length {suite.config.length} is too small: {reason}")
    return None


def _provenance(suite: RulerSuite, tasks: tuple[str, ...]) -> tuple[list[str], bool]:
    """Lines for the table's header, and whether data, seed and template are the official ones."""
    notes = [f"template: {suite.template.name}"]
    departures = []
    if not suite.template.official:
        departures.append("template=chat is the model's own template, an extension of the official protocol")
    if suite.config.seed != OFFICIAL_SEED:
        departures.append(f"seed {suite.config.seed} in place of the official {OFFICIAL_SEED}")
    needed = dict.fromkeys(source for task in tasks for source in TASKS[task].sources)
    for source in needed:
        if source == "ruler/essays":
            if not suite.sources.official_essays:
                departures.append("a substitute haystack takes the place of the official essays")
            elif _beyond_repository(suite):
                notes.append("the haystack goes past the 49 essays whose text and order are the same everywhere")
        elif not suite.sources.locate(source).official:
            departures.append(f"{source}: not the official file")
    if "cwe" in tasks and not suite.sources.official_long_list:
        departures.append("english_words.json: not the official file")
    if len(tasks) < len(TASKS):
        notes.append(f"average over {len(tasks)} of the {len(TASKS)} tasks")
    return [*notes, *departures], not departures


def _beyond_repository(suite: RulerSuite) -> bool:
    if suite.config.length <= REPOSITORY_WORDS:
        return False  # a word has at least one token
    return suite.count(" ".join(suite.sources.essays.words[:REPOSITORY_WORDS])) < suite.config.length
