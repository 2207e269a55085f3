"""The table a run ends with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_summary(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a stored summary; the same for a run that just ended and one found finished."""
    out = console or Console(highlight=False, soft_wrap=True)
    method, model, task = summary["method"], summary["model"], summary["task"]
    knobs = ", ".join(f"{k}={knob_text(v)}" for k, v in method.items() if k != "name" and v is not None)
    accuracy = summary["accuracy"]
    profile = "" if task.get("profile", "official") == "official" else f", profile {task['profile']}"
    title = f"{task['name']}{profile} · {model['name']} · {method['name']}" + (f" ({knobs})" if knobs else "")
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("task")
    for name in ("score", "n", "95 % interval", "prompt tokens (min / median / max)"):
        table.add_column(name, justify="right")
    averages = {}
    for name, row in accuracy.items():
        if not isinstance(row, Mapping):
            averages[name] = row
            continue
        lengths = row["length_tokens"]
        table.add_row(
            name,
            number(row["score"], 2),
            str(row["n"]),
            "-" if row["ci95"] is None else f"{row['ci95'][0]:.1f} to {row['ci95'][1]:.1f}",
            "-" if lengths is None else f"{lengths['min']} / {lengths['median']:g} / {lengths['max']}",
        )
    partial = " (partial)" if averages.pop("average_partial", False) else ""
    table.add_section()
    for name, value in averages.items():
        table.add_row(name + partial, number(value, 2), "", "", "")
    out.print(table)
    for skipped in summary["skipped"]:
        out.print(f"skipped {skipped['task']}: {skipped['reason']}")
    for note in summary["notes"]:
        out.print(f"note: {note}")
    out.print(_sparsity_line(summary))
    out.print(_fidelity_line(summary))
    out.print(_validity_line(summary))
    out.print(status_line(summary))


def status_line(summary: Mapping[str, Any]) -> str:
    """What a run came to, why if it is not complete, how many laws it breaks, and which run it is."""
    reason = f": {summary['reason']}" if summary.get("reason") else ""
    count = summary.get("laws_broken")
    broken = f" · {count} {'laws' if count > 1 else 'law'} broken" if count else ""
    return f"status {summary['status']}{reason}{broken} · run {summary['run_id']}"


def results() -> Console:
    """Where results are printed: standard output, wide enough for a table where it is no terminal."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=160)


def knob_text(value: Any) -> str:
    """A knob's value, or its shape where it is a table."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return f"[{len(value)} x {len(value[0])}]"
    return str(value)


def number(value: float | None, digits: int) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _sparsity_line(summary: Mapping[str, Any]) -> str:
    s = summary["sparsity"]
    line = (
        f"measured: sparsity {number(s['sparsity'], 4)} · kept {number(s['keep_io'], 4)} of tokens loaded per kv head, "
        f"{number(s['keep_head'], 4)} selected per query head · bytes {number(s['bytes_ratio'], 4)} of dense"
    )
    if s["keep_io"] == 1.0 and not summary["reads_everything"]:
        line += "\nkeep_io is 1: the budget or margin covers the whole context, nothing was left out"
    return line


def _fidelity_line(summary: Mapping[str, Any]) -> str:
    f = summary["fidelity"]
    return (
        f"fidelity: mass recall {number(f.get('mass_recall'), 4)} · "
        f"salient hits {number(f.get('salient_hit_rate'), 4)} · "
        f"lse error max {number(f.get('lse_error_max'), 4)}, mean {number(f.get('lse_error_mean'), 5)} nat · "
        f"Spearman {number(f.get('spearman'), 4)} · output error {number(f.get('output_rel_error'), 4)}"
    )


def _validity_line(summary: Mapping[str, Any]) -> str:
    v, t = summary["validity"], summary["timing"]
    return (
        f"path: {v['executor']} executor, {v['sparse_steps']} sparse + {v['dense_steps']} dense of "
        f"{v['expected_steps']} decode layer-steps, {'CUDA graph' if v['graph'] else 'eager'} · "
        f"prefill {number(t['prefill_s'], 2)} s, decode {number(t['decode_tok_s'], 1)} tok/s"
    )
