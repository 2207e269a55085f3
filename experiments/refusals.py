"""What `eval` and `ffd` refuse, as the one line that a user gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from eval.data import DataError
from eval.models import ModelError
from eval.records import TaskError
from experiments.errors import UsageError, as_typed, one_line
from experiments.keys import known_keys
from ffd.executor import ExecutorError
from ffd.methods import KnobError
from ffd.support import SettingError, UnsupportedModelError

REFUSALS: tuple[type[Exception], ...] = (DataError, ExecutorError, ModelError, TaskError, UnsupportedModelError)
"""Errors whose text is one line with field, value and what is accepted."""


@contextmanager
def refusals(*others: type[Exception]) -> Iterator[None]:
    """Raise `REFUSALS`, what a method refuses, and ``others`` like them, as `UsageError`."""
    try:
        yield
    except SettingError as error:  # the engine's own words are for a caller in Python
        raise UsageError(f"engine.{error.setting}=true: {error.reason}; expected auto or false") from None
    except KnobError as error:
        raise UsageError(knob_refusal(error)) from None
    except (*REFUSALS, *others) as error:
        raise UsageError(one_line(error)) from None


def knob_refusal(error: KnobError) -> str:
    """What a method says where it meets a model: of a knob (``deltas=``), or of the model's shape (``head_dim=``)."""
    said = one_line(error)
    return as_typed(said, {}) if f"method.{said.partition('=')[0]}" in known_keys() else said
