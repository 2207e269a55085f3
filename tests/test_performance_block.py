"""Blocks of measured figures in documents, and figures, are what the committed records make."""

from __future__ import annotations

import json
import shutil

import pytest

from analysis.__main__ import main
from analysis.drawing import data, svg
from analysis.performance import BEGIN, END, FIGURES, ROOT, blocks, by_length, figures, with_block, write_measurements


@pytest.mark.parametrize("name", blocks())
def test_a_document_says_what_the_records_say(name):
    text = (ROOT / name).read_text()
    assert with_block(text, blocks()[name], name) == text, "run: python -m analysis measurements"


def test_the_figures_data_are_the_records():
    for figure in figures():
        assert (FIGURES / f"{figure.name}.csv").read_text() == data(figure), "run: python -m analysis measurements"
        assert (FIGURES / f"{figure.name}.svg").exists()
        assert f"docs/figures/{figure.name}.svg" in blocks()["README.md"]


def test_another_record_makes_another_block(tmp_path):
    for name in ("kernel-h200.json", "throughput-h200.json"):
        shutil.copy(ROOT / "analysis" / "measurements" / name, tmp_path)
    record = json.loads((tmp_path / "kernel-h200.json").read_text())
    for row in record["rows"]:
        row["time_us"] *= 2
    (tmp_path / "kernel-h200.json").write_text(json.dumps(record))
    made = blocks(tmp_path)
    assert all(made[name] != text for name, text in blocks().items())
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    written = write_measurements(tmp_path, tmp_path)
    for name, text in made.items():
        assert (tmp_path / name).read_text() == f"before\n{BEGIN}\n{text}\n{END}\nafter\n"
    assert [path.name for path in written[len(made) :]] == [
        "kernel_latency.svg", "kernel_latency.csv", "kernel_roofline.svg", "kernel_roofline.csv"
    ]  # fmt: skip


def test_a_document_without_a_place_is_an_error():
    with pytest.raises(ValueError, match="expected the lines"):
        with_block(BEGIN, "", "README.md")


def test_the_step_without_a_completed_block_stands_for_its_length():
    rows = [{"method": "ffd", "kept_target": 0.18, "T": T, "time_us": float(T)} for T in (16384, 16320, 32768)]
    found = by_length(rows)
    assert {length: row["ffd", 0.18]["T"] for length, row in found.items()} == {16384: 16320, 32768: 32768}


def test_the_roof_is_below_every_point():
    _, roofline = figures()
    (roof,) = [series for series in roofline.series if series.bound]
    slope = roof.y[0] / roof.x[0]
    for series in roofline.series:
        assert all(y >= 0.999 * slope * x for x, y in zip(series.x, series.y, strict=True)), series.label
    assert "stroke-dasharray" in svg(roofline)


def test_one_command_prints_what_it_wrote(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("analysis.performance.write_measurements", lambda: [tmp_path / "README.md"])
    assert main(["measurements"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'README.md'}\n"
