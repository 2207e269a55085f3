"""Tables of runs in the documents say what the committed records say, to the digits shown."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RULER = ("niah_single_1", "niah_multikey_2", "vt", "cwe")
LONGBENCH = ("multifieldqa_zh", "passage_retrieval_zh", "multi_news")
KNOBS = {"quest": "token_budget", "topk": "token_budget", "topp": "p", "twilight": "p", "kivi": "bits"}


def rows_of(record: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "analysis" / "measurements" / f"{record}-qwen05b-h200.json").read_text())["rows"]


def table(document: str, after: str) -> list[dict[str, str]]:
    """The first table below a text, by its header."""
    text = (ROOT / "docs" / document).read_text()
    lines = text[text.index(after) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    cells = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def numbers(cell: str) -> list[str]:
    return re.findall(r"-?\d*\.?\d+", cell.replace(",", ""))


def holds(cell: str, values: Sequence[float]) -> None:
    """Every number of a cell is the value beside it, to its decimals; without any, exact or a percentage."""
    shown = numbers(cell)
    assert len(shown) == len(values), (cell, values)
    for text, value in zip(shown, values, strict=True):
        unit = 10.0 ** -len(text.partition(".")[2]) if "." in text else float("%" in cell)
        assert float(text) == pytest.approx(value, abs=0.5001 * unit), (cell, value)


def method_of(label: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of a record whose method and knob a label names."""
    name, knob = label.split(",")[0].split()[0], numbers(label)

    def named(method: dict[str, Any]) -> bool:
        key = KNOBS.get(method["name"], "delta")
        same = not knob or key not in method or float(knob[0]) == float(method[key])
        scan, centred = method.get("pseudo_max") == "scan", bool(method.get("centre"))
        if method["name"] != name or bool(method.get("deltas")) != ("per head" in label):
            return False
        return same and scan == ("`scan`" in label) and centred == ("centred" in label)

    (row,) = [row for row in rows if named(row["method"])]
    return row


@pytest.mark.parametrize(
    ("record", "after"),
    [
        ("ruler-16k", "## Every method on RULER at 16K"),
        ("ruler-16k-matched", "### At one share of loaded tokens"),
        ("ruler-16k-calibrated", "### With calibrated margins"),
    ],
)
def test_ruler(record, after):
    rows, shown = rows_of(record), table("measurements.md", after)
    assert len(shown) == len(rows)
    for line in shown:
        row = method_of(line["method"], rows)
        scores = [row["accuracy"][task]["score"] for task in RULER]
        for task, score in zip(RULER, scores, strict=True):
            holds(line[task], [score])
        holds(line["average"], [sum(scores) / len(scores)])
        holds(line["loaded"], [row["sparsity"]["keep_io"]])
        holds(line["bytes of dense"], [row["sparsity"]["bytes_ratio"]])
        if "less_dense" in row:
            less = row["less_dense"]["all tasks"]
            holds(line["less dense, paired, 95 %"].replace("+", ""), [less["points"], *(less["ci95"] or ())])
        if ".273 met within .01" in line and row["method"]["name"] != "dense":
            met = abs(row["sparsity"]["keep_io"] - 0.273) <= 0.01
            assert line[".273 met within .01"].startswith("yes" if met else "**no**")


def test_longbench():
    rows, shown = rows_of("longbench"), table("measurements.md", "## LongBench rows")
    assert len(shown) * 2 == len(rows)  # Chinese sets and multi_news are runs of their own
    for line in shown:
        chinese, news = (
            method_of(line["method"], [r for r in rows if set(r["task"]["tasks"]) <= set(tasks)])
            for tasks in (LONGBENCH[:2], LONGBENCH[2:])
        )
        scores = {**chinese["accuracy"], **news["accuracy"]}
        assert {scores[task]["n"] for task in LONGBENCH} == {100}
        for task in LONGBENCH:
            holds(line[task], [scores[task]["score"]])
        holds(line["mean"], [sum(scores[task]["score"] for task in LONGBENCH) / 3])
        holds(line["loaded, zh / news"], [r["sparsity"]["keep_io"] for r in (chinese, news)])
        holds(line["bytes, zh / news"], [r["sparsity"]["bytes_ratio"] for r in (chinese, news)])


def test_fidelity():
    rows = [row for row in rows_of("fidelity-16k") if row["task"]["name"] == "ruler"]
    shown = table("fidelity.md", "### Qwen2.5-Coder-0.5B at 16K")
    assert len(shown) == len(rows)
    for line in shown:
        row = method_of(line["method"], rows)
        metrics, forced, sparsity = row["metrics"], row["forced"], row["sparsity"]
        holds(line["selected / loaded"], [metrics["keep_head"]["macro"], sparsity["keep_io"]])
        holds(line["bytes"], [sparsity["bytes_ratio"]])
        holds(line["mass recall, mean / least"], [metrics["mass_recall"][key] for key in ("macro", "min")])
        holds(line["salient hits"], [metrics["salient_hit_delta"]["macro"]])
        holds(line["lse error, mean / max"], [metrics["lse_error"][key] for key in ("macro", "max")])
        holds(line["KL, mean / max"], [forced["kl_mean"], forced["kl_max"]])
        holds(line[f"perplexity (dense {forced['perplexity_dense']:.4f})"], [forced["perplexity"]])


def test_head_wise():
    rows = [row for row in rows_of("fidelity-16k") if row["task"]["name"] == "ruler" and row["method"]["name"] == "ffd"]
    shown = table("fidelity.md", "The paper's head-wise numbers")
    for column, label in (
        ("`refined`", "ffd, delta 5"),
        ("`scan` (official)", "ffd, delta 5, `scan`"),
        ("centred, sub-block 32", "ffd, delta 5, centred"),
    ):
        metrics = method_of(label, rows)["metrics"]
        pairs = metrics["keep_head"]["pairs"]
        expected = [[pairs["min"]], [pairs["max"]], [pairs["std"]], [metrics["salient_hit_delta_selected"]["macro"]]]
        for name in ("keep_head", "salient_hit"):
            expected.append([metrics[f"{name}_{case}"]["macro"] for case in ("proxy_error", "regular")])
        for line, values in zip(shown, expected, strict=True):
            holds(line[column], [100 * value for value in values])


def test_calibrated_margins_beside_one():
    rows = [row for row in rows_of("fidelity-16k") if row["task"]["name"] == "ruler"]
    for line in table("fidelity.md", "**On the 32 prompts of the first table**"):
        if line["margins"].startswith("per head"):
            (row,) = rows_of("fidelity-16k-calibrated")
        else:
            row = method_of(f"ffd {line['margins'].removeprefix('one, ')}", rows)
        metrics, forced = row["metrics"], row["forced"]
        own = metrics["mass_recall_selected"]
        holds(line["bytes"], [row["sparsity"]["bytes_ratio"]])
        holds(line["loaded"], [row["sparsity"]["keep_io"]])
        holds(
            line["mass recall, a pair's own selection: mean / worst pair / 5th percentile"],
            [own["macro"], own["pairs"]["min"], own["pairs"]["p5"]],
        )
        holds(line["as loaded, mean / least step"], [metrics["mass_recall"][key] for key in ("macro", "min")])
        holds(line["KL, mean / max"], [forced["kl_mean"], forced["kl_max"]])


def test_calibration():
    (row,) = rows_of("calibration-16k")
    per_head, held_out, one, one_held_out, _ = table("fidelity.md", "**Calibration at 16K**")
    found = (row["calibrated"], row["held_out"], row["uniform"], row["uniform_held_out"])
    for line, value in zip((per_head, held_out, one, one_held_out), found, strict=True):
        pairs, met = value["pairs"], value["pairs_meeting"]
        cell = line["pairs: worst / 5th percentile / at least 0.95"].replace("all", "100 %")
        holds(cell, [pairs["min"], pairs["p5"], 100 * met])
        holds(line["mass recall"], [value["mass_recall"]])
        holds(line["loaded"], [value["keep_io"]])
        holds(line["bytes"], [value["bytes_ratio"]])


def test_time_of_fidelity():
    """Medians after the first prompt; all that a prompt takes beyond dense attention's prefill is decoding."""

    def middle(rows, what, key="total_s"):
        own = sorted(row[key] for row in [r for r in rows if r["what"] == what and r.get("graph", True)][1:])
        return own[len(own) // 2]

    folder = ROOT / "analysis" / "measurements"
    small, large = (
        json.loads((folder / f"fidelity-time-32k-{model}-h200.json").read_text())["rows"]
        for model in ("qwen05b", "llama8b")
    )
    prefill, decode, both, runner, decoding, generation = table("fidelity.md", "**Time at 32K**")
    columns = {
        "0.5B, text": (small, "dense generate", ["both passes", "runner=fidelity, one prompt"]),
        "0.5B, task": (small, "task: dense generate", ["task: both passes"]),
        "8B, given tokens": (large, "dense generate", ["both passes, given, delta 7.0"]),
        "8B, its own answer": (large, "dense generate", ["both passes, its own answer, delta 7.0"]),
    }
    for column, (rows, dense, passes) in columns.items():
        whole, before, steps = (middle(rows, dense, key) for key in ("total_s", "prefill_s", "decode_s"))
        took = [middle(rows, what) for what in passes]
        times = [(t - before) / steps for t in took]
        holds(prefill[column], [before])
        holds(decode[column], [steps])
        holds(both[column], took[:1])
        holds(runner[column], took[1:])
        holds(decoding[column].replace("*", ""), times)
        holds(generation[column], [t / whole for t in took])
        assert max(times) < 3
