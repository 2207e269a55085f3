"""The method of a composed configuration: aliases of its knobs, margins of a calibration, values it accepts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.checks import delta, group
from experiments.errors import UsageError, as_typed, one_line

ALIASES = ("delta", "delta_unit")
"""Top-level keys that stand for the method's knob of the same name."""


def method_config(values: Mapping[str, Any], multirun: bool) -> dict[str, Any]:
    """Validate ``method``; raises `UsageError`.

    Parameters
    ----------
    values
        The composed configuration.
    multirun
        Whether an alias that the method does not have is dropped instead of refused.

    Returns
    -------
    dict
        ``name`` and knobs.
    """
    from ffd.methods import KnobError, create

    method = group(values, "method")
    for alias in ALIASES:
        value = values.get(alias)
        if value is None:
            continue
        if alias in method:
            method[alias] = value
        elif not multirun:
            raise UsageError(f"{alias}={value}: method {method['name']} has no knob {alias}")
    if "delta" in method:
        method["delta"] = delta("method.delta" if values.get("delta") is None else "delta", method["delta"])
    if isinstance(method.get("deltas"), str):
        method["deltas"] = read_margins(Path(method["deltas"]), method)
    knobs = {knob: value for knob, value in method.items() if knob != "name"}
    try:
        create(method["name"], knobs)
    except KnobError as error:
        raise UsageError(as_typed(one_line(error), {alias: values.get(alias) for alias in ALIASES})) from None
    except TypeError:
        bad = ", ".join(f"{k}={v}" for k, v in knobs.items())
        raise UsageError(f"method {method['name']}: a knob has a value of the wrong type ({bad})") from None
    return method


def read_margins(path: Path, method: Mapping[str, Any]) -> list[list[float]]:
    """Margins per layer and head from the ``method.yaml`` of a calibration.

    The numbers themselves become part of the run's configuration and identity, not the file's name. They hold for the
    storage and rule they were found with, so the other knobs must be the same.
    """
    import yaml

    if path == Path():  # nothing was given
        raise UsageError("method.deltas=: expected the method.yaml of runner=calibrate, with deltas")
    try:
        stored = yaml.safe_load(path.read_text())
        margins = [list(row) for row in stored["deltas"]]
    except OSError as error:
        raise UsageError(f"method.deltas={path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError):
        raise UsageError(f"method.deltas={path}: expected the method.yaml of runner=calibrate, with deltas") from None
    for knob, value in stored.items():
        if knob not in ("delta", "deltas") and method.get(knob) != value:
            raise UsageError(
                f"method.{knob}={method.get(knob)}: expected {value}, with which method.deltas={path} was calibrated"
            )
    return margins
