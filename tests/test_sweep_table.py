"""The table that a sweep ends with: every kind of job by its own key figures."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from experiments.job import Outcome
from experiments.jobs import Job
from experiments.key_figures import COLUMNS, key_figures
from experiments.sweep_table import print_sweep

ROOT = Path(__file__).parent.parent
ACCURACY = {
    "runner": "accuracy",
    "accuracy": {
        **{"vt": {"score": 50.0, "n": 3}, "cwe": {"score": 70.0, "n": 2}},
        **{"average": 60.0, "average_partial": True},
    },
    "sparsity": {"keep_io": 0.25, "bytes_ratio": 0.5},
    "fidelity": {"mass_recall": None},
    "timing": {"decode_tok_s": 12.34},
}


def throughput_row(method: str, ms: float | None, *, B: int = 1, T: int = 4096, **other: object) -> dict[str, object]:
    row = {"protocol": "fair", "method": method, "B": B, "T": T, "fuse": "auto", "kept": 0.18, **other}
    return (
        {**row, "problem": "out of memory"} if ms is None else {**row, "ms_per_step": ms, "tokens_per_second": 1e3 / ms}
    )


THROUGHPUT = {
    "runner": "throughput",
    "method": {"name": "ffd"},
    "rows": [
        throughput_row("dense", 8.0, T=16384),
        throughput_row("dense", 9.0, T=16384, fuse="false"),
        throughput_row("ffd", 5.0, T=16384),
        throughput_row("ffd", 6.0, T=16384, fuse="false"),
        throughput_row("ffd", 3.0, B=2, T=4096),
        throughput_row("dense", 40.0, T=16384, protocol="paper-flash"),
        throughput_row("ffd", None, T=65536),
    ],
}


def printed(summaries: list[dict[str, object] | None], tmp_path: Path) -> list[list[str]]:
    """Cells of the table's lines, the header first."""
    outcomes = []
    for number, summary in enumerate(summaries):
        folder = tmp_path / "runs" / f"run-{number}"
        folder.mkdir(parents=True)
        if summary is not None:
            (folder / "summary.json").write_text(json.dumps(summary))
        outcomes.append(Outcome("complete" if summary else "failed", None, folder.name if summary else None))
    jobs = [Job((f"seed={number}",)) for number in range(len(summaries))]
    text = io.StringIO()
    print_sweep("sweep", jobs, outcomes, tmp_path, Console(file=text, width=200))
    lines = [line.replace("┃", "│").split("│")[1:-1] for line in text.getvalue().splitlines()]
    return [[cell.strip() for cell in cells] for cells in lines if cells]


def test_a_throughput_job_is_told_by_its_rows_and_its_rate_at_the_largest_cache(tmp_path: Path) -> None:
    header, line = printed([THROUGHPUT], tmp_path)
    assert header == ["job", "rows", "at", "kept", "tok/s", "x dense", "status", "run"]
    assert line[1:6] == ["6 of 7", "B=1 T=16384", "0.180", "200.0", "1.60"]  # every figure was a dash


def test_dense_has_no_ratio_to_itself_and_nothing_timed_has_no_point() -> None:
    dense = {**THROUGHPUT, "method": {"name": "dense"}, "rows": THROUGHPUT["rows"][:1]}
    assert key_figures(dense) == {"rows": "1", "at": "B=1 T=16384", "kept": "0.180", "tok/s": "125.0"}
    assert key_figures({**THROUGHPUT, "rows": []}) == {"rows": "0"}


def test_a_kernel_job_is_told_by_the_committed_records_fields() -> None:
    record = json.loads((ROOT / "analysis" / "measurements" / "kernel-h200.json").read_text())
    found = key_figures({**record, "runner": "kernel", "method": {"name": "ffd"}})
    own = [r for r in record["rows"] if r["method"] == "ffd" and {"attend", "reduce"} <= set(r["step"])]
    largest = max(r["B"] * r["T"] for r in own)
    assert found["rows"].startswith(str(len(record["rows"])))
    batch, tokens = (int(part.partition("=")[2]) for part in found["at"].split())
    assert batch * tokens == largest
    here = [r for r in own if (r["B"], r["T"]) == (batch, tokens)]
    assert (found["us"], found["kept"]) in {(f"{r['time_us']:.1f}", f"{r['kept']:.3f}") for r in here}


def replay(*points: tuple[str, float | None, float | None, float | None]) -> dict[str, object]:
    keys = ("label", "keep_io", "bytes_ratio", "mass_recall")
    found = [dict(zip(keys, point, strict=True)) for point in points]
    return {"runner": "fidelity", "method": {"name": "sweep"}, "task": {"name": "replay"}, "points": found}


def test_a_replay_is_told_by_its_points_and_the_range_of_their_figures(tmp_path: Path) -> None:
    several = replay(("topk 64", 0.1, 0.6, 0.7), ("topk 128", 0.2, 0.6, 0.95), ("exact", 0.15, None, 0.9))
    header, *lines = printed([several, replay(("ffd delta=5", 0.3, 0.4, None))], tmp_path)
    assert header == ["job", "rows", "at", "kept", "bytes", "mass recall", "status", "run"]  # nothing but the status
    assert [line[1:-2] for line in lines] == [
        ["3", "-", "0.100 to 0.200", "0.600", "0.7000 to 0.9500"],
        ["1", "ffd delta=5", "0.300", "0.400", "-"],
    ]
    assert key_figures(replay()) == {"rows": "0"}


def test_a_replays_committed_record_has_key_figures() -> None:
    (summary,) = json.loads((ROOT / "analysis" / "measurements" / "replay-16k-qwen05b-h200.json").read_text())["rows"]
    found = key_figures(summary)
    assert found["rows"] == str(len(summary["points"]))
    least, most = (bound(p["keep_io"] for p in summary["points"]) for bound in (min, max))
    assert found["kept"] == f"{least:.3f} to {most:.3f}"


def test_jobs_of_all_kinds_stand_in_one_table(tmp_path: Path) -> None:
    calibrated = {"keep_io": 0.2, "bytes_ratio": 0.3, "mass_recall": 0.95}
    calibrate = {"runner": "calibrate", "calibrated": calibrated}
    header, *lines = printed([ACCURACY, THROUGHPUT, calibrate, None], tmp_path)
    assert header == ["job", *(c for c in COLUMNS if c != "us"), "status", "run"]
    assert [line[1:-2] for line in lines] == [
        ["60.00*", "5", "-", "-", "0.250", "0.500", "-", "12.3", "-"],
        ["-", "-", "6 of 7", "B=1 T=16384", "0.180", "-", "-", "200.0", "1.60"],
        ["-", "-", "-", "-", "0.200", "0.300", "0.9500", "-", "-"],
        ["-"] * 9,
    ]


def test_a_table_of_failures_has_no_columns_of_dashes(tmp_path: Path) -> None:
    assert printed([None, None], tmp_path)[0] == ["job", "status", "run"]
