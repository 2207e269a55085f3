"""What a run found beside a score, and what is wrong with it, in a few words."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.load import Run


def found(run: Run) -> str:
    """The main figures of a runner that gives no score; empty where there are none yet."""
    if run.summary.get("points") is not None:
        return _replayed(run)
    if run.summary.get("calibrate") is not None:
        return _calibrated(run)
    if run.runner == "fidelity":
        return _followed(run)
    return _count(len(run.rows), "timing") if run.rows else ""


def wrong(run: Run) -> str:
    """The laws that it broke, and why it is not complete."""
    broken = run.figure("laws_broken")
    names = [str(law.get("law")) for law in run.summary.get("laws") or () if not law.get("holds")]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    told = f"broke {_count(int(broken), 'law')}: {names[0] if names else 'not named'}{more}" if broken else ""
    return "; ".join(part for part in (told, run.reason) if part)


def _followed(run: Run) -> str:
    """Of `runner=fidelity`; a summary older than the samples says of how many prompts it is."""
    parts = _parts((("mass recall", run.figure("fidelity.mass_recall"), 4), ("KL", run.figure("forced.kl_mean"), 5)))
    prompts = run.figure("timing.prompts")
    behind = prompts is not None and prompts != len(run.samples)
    return parts + (f" (of {_count(int(prompts or 0), 'prompt')})" if parts and behind else "")


def _calibrated(run: Run) -> str:
    """Of `runner=calibrate`: on held-out prompts where there are some, else on those that the margins come from."""
    asked: Mapping[str, object] = run.summary["calibrate"]
    part, where = ("held_out", "held out") if run.summary.get("held_out") else ("calibrated", "on its own prompts")
    reached = run.figure(f"{part}.reached")
    if reached is None:
        return ""
    target = str(asked.get("target")).replace("_", " ")
    meeting = run.figure(f"{part}.pairs_meeting")
    met = "" if meeting is None else f", met by {100 * meeting:.0f} % of pairs"
    return f"{target} {reached:.4f} {where} (asked {asked.get('value')} per {asked.get('per')}{met})"


def _replayed(run: Run) -> str:
    points = run.summary["points"]
    parts = [_count(len(points), "point")]
    for name, key, digits in (("kept", "keep_io", 3), ("mass recall", "mass_recall", 4)):
        values = [point[key] for point in points if isinstance(point.get(key), int | float)]
        if values:
            bounds = dict.fromkeys(f"{bound:.{digits}f}" for bound in (min(values), max(values)))
            parts.append(f"{name} {' to '.join(bounds)}")
    return ", ".join(parts)


def _parts(figures: tuple[tuple[str, float | None, int], ...]) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value, digits in figures if value is not None)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
