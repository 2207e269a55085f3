"""Decode methods, found by looking: a module here that defines a `Method` is a method.

All that a method is written with is imported from here.
"""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ffd.method_layer import Executor, LayerGeometry, MethodLayer, RowState, Selection
from ffd.methods.base import KnobError, Method, SearchKnob, require

__all__ = [
    "Executor",
    "KnobError",
    "LayerGeometry",
    "Method",
    "MethodLayer",
    "RowState",
    "SearchKnob",
    "Selection",
    "create",
    "method_class",
    "method_names",
    "require",
]


def method_names() -> tuple[str, ...]:
    """Names of the built-in methods, sorted: the modules of this package."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"))


@cache
def method_class(name: str) -> type[Method]:
    """Find the class of a method.

    Parameters
    ----------
    name
        A built-in name, or ``package.module:ClassName`` for a method that lives elsewhere.

    Raises
    ------
    KnobError
        If there is no such method, or its module cannot be imported.
    """
    module_name, _, class_name = name.partition(":")
    if class_name:
        return _from_elsewhere(name, module_name, class_name)
    if name not in method_names():
        raise KnobError(f"method={name}: expected one of {', '.join(method_names())}, or package.module:ClassName")
    module = _from_here(name)
    for candidate in vars(module).values():
        if isinstance(candidate, type) and issubclass(candidate, Method) and vars(candidate).get("name") == name:
            return candidate
    raise KnobError(f"method={name}: module {module.__name__} defines no Method named {name}")


def _from_here(name: str) -> ModuleType:
    module_name = f"{__name__}.{name}"
    try:
        return importlib.import_module(module_name)
    except SyntaxError as error:
        raise _not_imported(name, error, (error.filename, error.lineno), error.msg) from error
    except Exception as error:  # whatever a module raises while it is imported
        own = [
            (frame.f_code.co_filename, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__") == module_name
        ]
        raise _not_imported(name, error, own[-1] if own else (None, None), str(error)) from error


def _not_imported(name: str, error: Exception, where: tuple[str | None, int | None], said: str) -> KnobError:
    file, line = where
    place = "" if file is None else f" ({Path(file).name}, line {line})"
    return KnobError(f"method={name}: {type(error).__name__}{place}: {said}")


def _from_elsewhere(name: str, module_name: str, class_name: str) -> type[Method]:
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise KnobError(f"method={name}: expected package.module:ClassName, the module by its full name")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises while it is imported
        said = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise KnobError(
            f"method={name}: cannot import {module_name} ({said}); expected a module that Python finds, "
            "e.g. in a folder that PYTHONPATH names"
        ) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise KnobError(f"method={name}: {module_name} has no subclass of ffd.methods.Method named {class_name}")
    missing = [*sorted(found.__abstractmethods__), *(() if hasattr(found, "name") else ("name",))]
    if missing:
        raise KnobError(f"method={name}: {class_name} does not define {', '.join(missing)}; see CONTRIBUTING.md")
    return found


def create(name: str, knobs: Mapping[str, Any] | None = None) -> Method:
    """Build a method from its name and knobs; raises `KnobError` on an unknown name, knob or value."""
    return method_class(name).from_knobs(knobs or {})
