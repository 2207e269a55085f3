"""Blocks of measured figures in documents, and figures, are what the committed records make."""

from __future__ import annotations

import json

import pytest

from analysis.__main__ import main
from analysis.components import selection_lines
from analysis.drawing import data, svg
from analysis.kernel import by_length, methods
from analysis.measurements import Timing
from analysis.methods import method_lines
from analysis.performance import BEGIN, END, FIGURES, ROOT, blocks, figures, with_block, write_measurements
from analysis.steps import method_step_lines


@pytest.mark.parametrize("name", blocks())
def test_a_document_says_what_the_records_say(name):
    text = (ROOT / name).read_text()
    assert with_block(text, blocks()[name], name) == text, "run: python -m analysis measurements"


def test_the_figures_data_are_the_records():
    for figure in figures():
        assert (FIGURES / f"{figure.name}.csv").read_text() == data(figure), "run: python -m analysis measurements"
        assert (FIGURES / f"{figure.name}.svg").exists()
    shown = "".join(blocks().values())
    assert all(f"figures/{figure.name}.svg" in shown for figure in figures())


def test_another_record_makes_another_block(tmp_path):
    for name, time in (
        ("kernel-h200.json", "time_us"),
        ("throughput-h200.json", "ms_per_step"),
        ("throughput-methods-h200.json", "ms_per_step"),
    ):
        record = json.loads((ROOT / "analysis" / "measurements" / name).read_text())
        for row in record["rows"]:
            row[time] *= 2
        (tmp_path / name).write_text(json.dumps(record))
    made = blocks(tmp_path)
    assert all(made[name] != text for name, text in blocks().items())
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    written = write_measurements(tmp_path, tmp_path)
    for name, text in made.items():
        assert (tmp_path / name).read_text() == f"before\n{BEGIN}\n{text}\n{END}\nafter\n"
    names = [f"kernel_{name}.{suffix}" for name in ("latency", "roofline", "methods") for suffix in ("svg", "csv")]
    assert [path.name for path in written[len(made) :]] == names


def test_whole_steps_of_every_method_stand_beside_dense():
    def step(method, T, ms, kept, **changes):
        row = {"protocol": "fair", "method": method, "B": 1, "T": T, "ms_per_step": ms, "tokens_per_second": 1e3 / ms}
        return {**row, "kept": kept, "fuse": "auto", **changes}

    rows = [
        step("dense", 16384, 4.0, 1.0),
        step("quest", 16384, 8.0, 0.25),
        step("quest", 65536, 6.0, 0.11),
        step("dense", 16384, 60.0, 1.0, protocol="paper-default"),
        step("quest", 16384, 9.0, 0.25, fuse="false"),
    ]
    lines = list(method_step_lines({"gpu": "g", "revision": "r", "date": "d", "model": "m", "rows": rows}))
    assert lines[-4:] == [
        "| method | batch 1, 16K | batch 1, 64K |",
        "|---|---:|---:|",
        "| dense | 4.00 | - |",
        "| quest | 8.00 (0.50x, 25 %) | 6.00 (11 %) |",
    ]


def test_a_document_without_a_place_is_an_error():
    with pytest.raises(ValueError, match="expected the lines"):
        with_block(BEGIN, "", "README.md")


def test_the_step_without_a_completed_block_stands_for_its_length():
    rows = [{"method": "ffd", "kept_target": 0.18, "T": T, "time_us": float(T)} for T in (16384, 16320, 32768)]
    found = by_length(rows)
    assert {length: row["ffd", 0.18]["T"] for length, row in found.items()} == {16384: 16320, 32768: 32768}


def test_the_roof_is_below_every_point():
    _, roofline, _ = figures()
    (roof,) = [series for series in roofline.series if series.bound]
    slope = roof.y[0] / roof.x[0]
    for series in roofline.series:
        assert all(y >= 0.999 * slope * x for x, y in zip(series.x, series.y, strict=True)), series.label
    assert "stroke-dasharray" in svg(roofline)


LENGTHS = (4032, 16320, 32704, 65472, 131008, 262080)


def timed(method: str, T: int, target: float, time_us: float, **changes: object) -> dict[str, object]:
    """A row as the runner writes it."""
    return {
        "method": method, "B": 1, "T": T, "Hq": 32, "Hkv": 8, "d": 128, "dtype": "bfloat16", "kept_target": target,
        "kept": target, "timing": "graph", "l2": "cold", "source": "planted", "step": ["append", "attend", "reduce"],
        "time_us": time_us, "best_dense_us": 100.0, "sdpa_flash_us": 200.0, **changes,
    }  # fmt: skip


def lines_of(rows: list[dict[str, object]], **record: object) -> list[str]:
    around = {"gpu": "g", "revision": "r", "date": "d", "slopes_us_per_1000_tokens": {}, **record}
    return list(method_lines(around, rows))


class TestEveryMethod:
    """The tables of docs/performance.md."""

    def test_a_full_record_leaves_no_dash_and_a_missing_row_is_one(self):
        rows = [timed(name, T, kept, 50.0) for name in ("quest", "ffd") for T in LENGTHS for kept in (0.02, 0.18, 1.0)]
        rows += [timed("kivi", T, 1.0, 400.0) for T in LENGTHS]
        lines = lines_of(rows)
        cells = " | ".join(["50.0 (2.00x, 4.00x)"] * 6)
        assert [line for line in lines if line.startswith("| quest")][:3] == [f"| quest | {cells} |"] * 3
        assert sum(line.startswith("| kivi | 400.0 (0.25x, 0.50x)") for line in lines) == 1
        assert [line.split(" |")[0] for line in lines if line.startswith(("| ffd", "| kivi", "| quest"))][:2] == [
            "| ffd", "| quest"
        ]  # fmt: skip
        without = lines_of([row for row in rows if (row["method"], row["T"]) != ("quest", 65472)])
        assert all(line.split(" | ")[4] == "-" for line in without if line.startswith("| quest | 50"))

    def test_a_cell_says_what_was_kept_where_it_is_not_the_target(self):
        (line,) = (
            line for line in lines_of([timed("twilight", 65472, 0.18, 50.0, kept=0.164)]) if "16.4 % kept" in line
        )
        assert "50.0 (2.00x, 4.00x, 16.4 % kept)" in line
        assert not any("% kept)" in line for line in lines_of([timed("topk", 65472, 0.18, 50.0, kept=0.175)]))

    def test_batches_stand_apart_and_the_ablation_elsewhere(self):
        rows = [timed("quest", 16320, 0.18, 50.0), timed("quest", 16320, 0.18, 25.0, B=8)]
        rows += [timed("component 2 bit topk fused", 16320, 0.273, 1.0), timed("dense", 16320, 1.0, 100.0)]
        lines = lines_of(rows)
        assert "| quest | - | 25.0 (4.00x, 8.00x) | - | - | - | - |" in lines
        assert "| dense (ours) | - | 100.0 (1.00x, 2.00x) | - | - | - | - |" in lines
        assert not any("component" in line for line in lines)

    def test_what_was_refused_is_named_with_the_reason(self):
        refused = [{"refused": "quest kept=0.02 B=1 T=262080", "reason": "keeps 0.041", "wrong": False},
                   {"refused": "flashinfer B=1 T=262080", "reason": "not installed", "wrong": False}]  # fmt: skip
        lines = lines_of([timed("quest", 16320, 0.18, 50.0)], refused=refused)
        assert "Not timed: quest kept=0.02 B=1 T=262080 (keeps 0.041)." in lines
        assert not any("flashinfer" in line for line in lines)

    def test_slopes_are_told_at_the_compared_share(self):
        slopes = {"dense": 0.9, "quest kept 0.18": 0.5, "quest kept 1": 3.0, "kivi kept 1": 2.0}
        rows = [timed("quest", 16320, 0.18, 50.0), timed("kivi", 16320, 1.0, 50.0)]
        lines = lines_of(rows, slopes_us_per_1000_tokens=slopes)
        assert "Another 1000 tokens cost at 18 % kept, in us: dense 0.90, quest 0.50, kivi 2.00." in lines

    def test_the_figure_has_a_line_per_method_at_one_share(self):
        rows = [timed(name, T, kept, T / 100) for name in ("quest", "ffd") for T in LENGTHS for kept in (0.02, 0.18)]
        rows += [timed("kivi", T, 1.0, 400.0) for T in LENGTHS] + [timed("dense", T, 1.0, 100.0) for T in LENGTHS]
        figure = methods([Timing("", "g", "", row) for row in rows])
        assert [series.label for series in figure.series] == ["dense", "ffd kept 18 %", "kivi", "quest kept 18 %"]
        assert all(len(series.x) == 6 for series in figure.series)


def test_at_most_lengths_the_ablation_has_the_papers_points_alone():
    rows = [
        timed(f"component 2 bit {rule} decoupled", 4032, 0.273, us) for rule, us in (("topk", 30), ("topdelta", 10))
    ]
    lines = list(selection_lines({"gpu": "g", "revision": "r", "date": "d", "rows": rows}))
    assert [line for line in lines if line.startswith("| 4K")] == [
        "| 4K | 2 bit, decoupled | 10.0 | 30.0 | - | 1 : 3 : - |"
    ]


def test_one_command_prints_what_it_wrote(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("analysis.performance.write_measurements", lambda: [tmp_path / "README.md"])
    assert main(["measurements"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'README.md'}\n"
