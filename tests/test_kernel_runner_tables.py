"""Tables and figures of kernel rows: of runs as of records, unusual conditions named, interpreted times left out."""

from __future__ import annotations

import json

import pytest

from analysis.figures import build_figures
from analysis.load import load
from analysis.tables import build_tables

ROW = {
    "method": "ffd", "B": 1, "T": 16320, "Hq": 32, "Hkv": 8, "d": 128, "dtype": "bfloat16", "kept_target": 0.18,
    "source": "planted", "trace": "", "timing": "graph", "l2": "cold", "step": ["append", "scan", "attend", "reduce"],
    "time_us": 17.5, "bytes": 9e6, "floor_us": 2.0, "sdpa_flash_us": 31.1, "best_dense_us": 23.2,
}  # fmt: skip
DENSE = {**ROW, "method": "sdpa_flash", "kept_target": 1.0, "time_us": 31.1, "step": ["attend", "reduce"]}


def run_folder(tmp_path, rows, device="NVIDIA H200"):
    """Results of one run of the kernel runner."""
    folder = tmp_path / "runs" / "ffd-kernel-1"
    folder.mkdir(parents=True)
    summary = {"run_id": "ffd-kernel-1", "status": "complete", "method": {"name": "ffd"}, "task": {"name": "kernel"},
               "rows": rows, "environment": {"device": device}}  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text("runner: kernel\n")
    return load(tmp_path)


def tables(outputs):
    return {table.name: table for table in build_tables(outputs)}


def test_rows_of_a_run_are_shown_with_their_run(tmp_path):
    found = tables(run_folder(tmp_path, [DENSE, ROW, {**ROW, "step": ["reduce"], "time_us": 2.3}]))
    (row,) = found["kernel_latency"].rows
    assert (row[0], [cell.value for cell in row[1]]) == ("B=1 T=16320, 18 % kept", [31.1, 17.5])
    assert row[1][1].run_ids == ("ffd-kernel-1",)
    assert found["kernel_latency"].columns == ("sdpa_flash", "ffd")
    assert dict(found["kernel_speedup"].rows)["B=1 T=16320, 18 % kept"][1].value == pytest.approx(23.2 / 17.5)
    assert found["kernel_stages"].columns == ("reduce",)
    assert [(name, cells[0].value) for name, cells in found["kernel_stages"].rows] == [
        ("B=1 T=16320 ffd kept 18 %", 2.3)
    ]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"timing": "eager"}, "B=1 T=16320 eager"),
        ({"l2": "hot"}, "B=1 T=16320 hot L2"),
        ({"Hq": 8, "d": 64}, "B=1 T=16320 Hq=8 Hkv=8 d=64 bfloat16"),
        ({"source": "captured", "trace": "vt-0 row 0", "kept_target": None}, "B=1 T=16320 captured (vt-0 row 0)"),
    ],
)
def test_unusual_conditions_have_rows_of_their_own_and_no_place_in_the_figures(tmp_path, changes, where):
    outputs = run_folder(tmp_path, [DENSE, ROW, {**ROW, **changes, "time_us": 99.0}])
    latency = tables(outputs)["kernel_latency"]
    where += "" if changes.get("trace") else ", 18 % kept"
    assert [name for name, _ in latency.rows] == ["B=1 T=16320, 18 % kept", where]
    assert {cell.value for cell in dict(latency.rows)[where]} == {None, 99.0}
    drawn = {figure.name: figure for figure in build_figures(outputs)}
    for name in ("kernel_latency", "kernel_roofline"):
        assert 99.0 not in {y for series in drawn[name].series for y in series.y}


def test_a_share_is_a_row_and_dense_stands_beside_each(tmp_path):
    # With eight methods at five shares one column each had made 45.
    rows = [{**ROW, "method": name, "kept_target": kept, "time_us": 10.0 + kept}
            for name in ("quest", "ffd") for kept in (1.0, 0.02)]  # fmt: skip
    latency = tables(run_folder(tmp_path, [DENSE, *rows, {**DENSE, "method": "kivi", "time_us": 50.0}]))[
        "kernel_latency"
    ]
    assert latency.columns == ("sdpa_flash", "quest", "ffd", "kivi")
    assert [(name, [cell.value for cell in cells]) for name, cells in latency.rows] == [
        ("B=1 T=16320, 2 % kept", [31.1, 10.02, 10.02, 50.0]), ("B=1 T=16320, 100 % kept", [31.1, 11.0, 11.0, 50.0]),
    ]  # fmt: skip


def test_interpreted_times_are_no_times(tmp_path):
    found = tables(run_folder(tmp_path, [{**ROW, "timing": "interpreted", "time_us": 5e5}], device="cpu"))
    assert 5e5 not in {cell.value for cell in found["kernel_latency"].cells}


def test_the_component_grid_has_a_table_of_its_own(tmp_path):
    # 24 columns more and a reason for each of 800 empty cells had made the latency table unreadable.
    grid = [
        {**ROW, "method": f"component 2 bit {rule} {path}", "kept_target": 0.273, "time_us": time}
        for time, (rule, path) in enumerate([("topdelta", "fused"), ("topk", "fused"), ("topk", "decoupled")], 40)
    ]
    found = tables(run_folder(tmp_path, [DENSE, ROW, *grid, {**ROW, "T": 65472}]))
    assert found["kernel_latency"].columns == ("sdpa_flash", "ffd")
    assert len({cell.reason for cell in found["kernel_latency"].cells if cell.value is None}) == 1
    assert [(name, [cell.value for cell in cells]) for name, cells in found["kernel_components"].rows] == [
        ("B=1 T=16320, 2 bit, fused", [40.0, 41.0, None]),
        ("B=1 T=16320, 2 bit, decoupled", [None, 42.0, None]),
    ]
