"""What fidelity runs and replays print of a stored summary: its figures, and the laws beside them."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from experiments.table import number, results, status_line


def print_fidelity(summary: dict[str, Any]) -> None:
    """Print a stored fidelity summary."""
    f, s, p = summary["fidelity"], summary["sparsity"], summary["forced"]
    pairs = summary["metrics"]["keep_head"]["pairs"]
    out = Table(
        title=f"fidelity · {summary['task']['name']} · {summary['model']['name']} · {summary['method']['name']}"
    )
    out.add_column("figure")
    out.add_column("value", justify="right")
    for name, value, digits in (
        ("tokens loaded (keep_io)", s["keep_io"], 4),
        ("selected per head (keep_head)", s["keep_head"], 4),
        ("keep_head over layer-head pairs: min", pairs["min"], 4),
        ("  max", pairs["max"], 4),
        ("  standard deviation", pairs["std"], 4),
        ("bytes of dense", s["bytes_ratio"], 4),
        ("mass recall", f.get("mass_recall"), 4),
        ("salient hit rate", f.get("salient_hit_rate"), 4),
        ("lse error, mean", f.get("lse_error_mean"), 5),
        ("lse error, max", f.get("lse_error_max"), 4),
        ("Spearman", f.get("spearman"), 4),
        ("output error", f.get("output_rel_error"), 4),
        ("pseudo-maximum gap, mean", f.get("pseudo_max_gap_mean"), 4),
        ("proxy-error cases", f.get("proxy_error_cases"), 4),
        ("  kept in them / in regular ones", f.get("keep_head_proxy_error"), 4),
        ("", f.get("keep_head_regular"), 4),
        ("perplexity", p["perplexity"], 4),
        ("perplexity, dense", p["perplexity_dense"], 4),
        ("KL mean", p["kl_mean"], 6),
        ("same likeliest token", p["top1_agreement"], 4),
    ):
        out.add_row(name, number(value, digits))
    results().print(out)
    print_broken(summary["laws"])
    results().print(f"counted: {summary['counted']}")
    results().print(status_line(summary))


def print_broken(laws: list[dict[str, Any]]) -> None:
    """Name the laws that do not hold, or say that all do."""
    broken = [law for law in laws if not law["holds"]]
    for law in broken:
        results().print(f"BROKEN LAW: {law['law']}: {law['detail']}")
    if not broken:
        results().print(f"all {len(laws)} sanity laws hold")
