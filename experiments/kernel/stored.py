"""Records read back: every field is checked, so that a damaged one ends in one line and not in a wrong table."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from experiments.errors import UsageError
from experiments.kernel.gate import MOST_LEDGER_ERROR, MOST_OUTPUT_ERROR
from experiments.kernel.rows import Item, Refusal, Row

MACHINE = ("gpu", "versions", "revision")
"""What records must share to be one."""
ROOF = "read_bandwidth_bytes_per_us"
_MOST = 1e18
"""Beyond every number of a record; what is larger is damage, infinity included."""


@dataclass(frozen=True)
class Check:
    """What a field accepts."""

    accepts: Callable[[Any], bool]
    words: str

    def or_null(self) -> Check:
        """None as well."""
        return Check(lambda value: value is None or self.accepts(value), f"{self.words}, or null")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) and entry for entry in value)


def _date(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(datetime.date.fromisoformat(value))
    except ValueError:
        return False


def _one_of(*names: str) -> Check:
    return Check(lambda value: isinstance(value, str) and value in names, f"one of {', '.join(names)}")


def _within(most: float) -> Check:
    return Check(lambda value: _number(value) and 0 <= value <= most, f"a number in [0, {most:g}]")


_COUNT = Check(lambda value: _number(value) and isinstance(value, int) and value >= 1, "an integer >= 1")
_POSITIVE = Check(lambda value: _number(value) and value > 0, "a finite number > 0")
_AMOUNT = Check(lambda value: _number(value) and value >= 0, "a finite number >= 0")
_SHARE = Check(lambda value: _number(value) and 0 < value <= 1, "a number in (0, 1]")
_TEXT = Check(lambda value: isinstance(value, str) and bool(value), "text")
_ANY_TEXT = Check(lambda value: isinstance(value, str), "text, which may be empty")
_TEXTS = Check(_texts, "a list of texts")
_STEP = Check(lambda value: _texts(value) and bool(value), "a list of stages")
_DATE = Check(_date, "a date such as 2026-01-31")
_MAPPING = Check(lambda value: isinstance(value, dict), "keys and values")
_BOOLEAN = Check(lambda value: isinstance(value, bool), "true or false")
_LIST = Check(lambda value: isinstance(value, list), "a list")
_VERSIONS = Check(
    lambda value: isinstance(value, dict) and all(isinstance(v, str) and v for v in value.values()),
    "names and versions",
)

ROW = {
    "method": _TEXT, "knobs": _MAPPING, "storage": _TEXT, "B": _COUNT, "T": _COUNT, "Hq": _COUNT, "Hkv": _COUNT,
    "d": _COUNT, "dtype": _one_of("bfloat16", "float16", "float32"), "trace": _ANY_TEXT,
    "kept_target": _SHARE.or_null(), "kept": _SHARE, "source": _one_of("planted", "captured"),
    "timing": _one_of("graph", "eager", "interpreted"), "l2": _one_of("cold", "hot"), "step": _STEP,
    "time_us": _POSITIVE, "bytes": _AMOUNT, "bytes_rule": _ANY_TEXT, "floor_us": _AMOUNT, "efficiency": _AMOUNT,
    "sdpa_flash_us": _POSITIVE.or_null(), "best_dense_us": _POSITIVE.or_null(),
    "rel_error": _within(MOST_OUTPUT_ERROR), "ledger_error": _within(MOST_LEDGER_ERROR), "sparse_steps": _AMOUNT,
    "beside": _TEXTS.or_null(),
}  # fmt: skip
"""By field of `Row`; errors are those that the gate lets pass."""
REFUSAL = {"refused": _TEXT, "reason": _ANY_TEXT, "wrong": _BOOLEAN}
RECORD = {"gpu": _TEXT, "versions": _VERSIONS, "revision": _TEXT, "date": _DATE, ROOF: _POSITIVE, "rows": _LIST,
          "refused": _LIST}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A record that was read."""

    rows: list[Row]
    refused: list[Refusal]
    bandwidth: float
    """Read bandwidth in bytes per us."""
    date: str
    machine: Mapping[str, Any]
    """`MACHINE`."""
    merged: bool
    """Whether it was put together from records of several processes."""


def read_record(path: Path, where: str) -> Stored:
    """Read a record; ``where`` names the file in errors.

    Raises
    ------
    UsageError
        If there is none, or one of its fields is not as `ROW`, `REFUSAL` and `RECORD` say.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{where}: does not exist") from None
    except (OSError, ValueError, RecursionError) as error:  # a directory, not text, not JSON
        raise UsageError(f"{where}: damaged ({type(error).__name__}); expected a record of this command") from None
    if not isinstance(content, dict) or not {"rows", "refused"} <= content.keys():
        raise UsageError(f"{where}: expected a record with rows and refused")
    _require({key: content[key] for key in RECORD if key in content}, RECORD, where)
    return Stored(
        rows=[row(one, f"{where}: row {number}") for number, one in enumerate(content["rows"], 1)],
        refused=[refusal(one, f"{where}: refusal {number}") for number, one in enumerate(content["refused"], 1)],
        bandwidth=float(content[ROOF]),
        date=content["date"],
        machine={key: content[key] for key in MACHINE},
        merged="note" in content,
    )


def row(stored: Any, where: str) -> Row:
    """A stored row; raises `UsageError` naming the field that is wrong."""
    optional = {field.name: field.default for field in fields(Row) if field.default is None}
    known = {**optional, **stored} if isinstance(stored, dict) else stored
    _require(known, ROW, where)
    return Row(**known)


def refusal(stored: Any, where: str) -> Refusal:
    """A stored refusal; raises `UsageError` naming the field that is wrong."""
    _require(stored, REFUSAL, where)
    return Refusal(stored["refused"], stored["reason"], stored["wrong"])


def item(stored: Mapping[str, Any], where: str) -> Item | None:
    """A row or refusal among a run's samples; None for what is neither, such as the read bandwidth."""
    own = {key: value for key, value in stored.items() if key not in ("task", "index")}
    if "bytes_per_us" in own:
        _require(own, {"bytes_per_us": _POSITIVE}, where)
    if "refused" in own:
        return refusal(own, where)
    return row(own, where) if "time_us" in own else None


def _require(stored: Any, checks: Mapping[str, Check], where: str) -> None:
    if not isinstance(stored, dict):
        raise UsageError(f"{where}: expected {', '.join(checks)}")
    for problem in _problems(stored, checks):
        raise UsageError(f"{where}: {problem}")


def _problems(stored: Mapping[str, Any], checks: Mapping[str, Check]) -> Iterator[str]:
    for name, check in checks.items():
        if name not in stored:
            yield f"{name} is missing; expected {check.words}"
        elif not check.accepts(stored[name]):
            yield f"{name}={json.dumps(stored[name])[:80]}: expected {check.words}"
    for name in stored:
        if name not in checks:
            yield f"{name}: no such field in this version"
