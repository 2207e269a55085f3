"""Records of several processes as one, and records read back: what is refused, and in which line."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from experiments.errors import UsageError
from experiments.kernel import __main__ as bare
from experiments.kernel import record, stored
from experiments.kernel.merge import merged
from experiments.kernel.rows import Refusal, Row
from tests.kernel_steps import row

MACHINE = {"gpu": "g", "versions": {"torch": "2"}, "revision": "r"}
COMMITTED = Path(__file__).resolve().parent.parent / "analysis" / "measurements" / "kernel-h200.json"
ABSENT = Refusal("flashinfer B=1", "not installed", wrong=False)


def written(path: Path, rows: list[Row], roof: float = 4e6, refused: tuple[Refusal, ...] = (ABSENT,)) -> Path:
    """A record of one process."""
    path.write_text(json.dumps(record.record(rows, refused, roof, MACHINE)))
    return path


def changed(path: Path, **changes: object) -> Path:
    """The record with other fields of its own; None removes one."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return path


def test_rows_keep_the_baselines_of_their_process_and_slopes_take_the_first(tmp_path):
    a = written(tmp_path / "a.json", [row(T=T, time_us=T / 500) for T in (1000, 2000, 4000)])
    b = written(tmp_path / "b.json", [row(T=1000, time_us=50.0, best_dense_us=9.0), row(method="quest")], 5e6)
    made = merged([a, b])
    assert [r["best_dense_us"] for r in made["rows"]] == [15.0, 15.0, 15.0, 9.0, 15.0]
    assert made["slopes_us_per_1000_tokens"] == {"ffd kept 0.18": 2.0}
    assert (made["read_bandwidth_bytes_per_us"], len(made["refused"]), made["gate"]["rows"]) == (4e6, 1, 5)
    assert "2 processes (read bandwidth 4000000, 5000000 bytes per us)" in made["note"]
    assert "has a row of each, which the gate counts; tables and slopes take the first" in made["note"]
    assert merged([written(tmp_path / "c.json", [row()])])["rows"] == [row().as_dict()]


def test_the_command_measures_nothing(tmp_path, capsys):
    parts = [written(tmp_path / name, [row(method=name)]) for name in ("a", "b")]
    assert bare.main(["--out", f"{tmp_path}/both.json", "--merge", *map(str, parts)]) == 0
    assert [r["method"] for r in json.loads((tmp_path / "both.json").read_text())["rows"]] == ["a", "b"]
    assert "gate: passed, largest error 0.002" in capsys.readouterr().out


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_one_process_found_wrong_is_wrong(tmp_path, order, capsys):
    # The last refusal of a label won, so that an absent library hid that the gate had refused it; the exit code was 0.
    refusals = (Refusal("sdpa_cudnn B=8", "output differs", True), Refusal("sdpa_cudnn B=8", "not built", False))
    paths = [written(tmp_path / f"{n}.json", [row(T=4000 + n)], refused=(refusals[n],)) for n in order]
    assert bare.main(["--out", f"{tmp_path}/both.json", "--merge", *map(str, paths)]) == 1
    (wrong,) = json.loads((tmp_path / "both.json").read_text())["gate"]["wrong"]
    assert (wrong["refused"], wrong["reason"]) == ("sdpa_cudnn B=8", "output differs")
    assert "gate: 1 timings refused by the gate, first sdpa_cudnn B=8: output differs" in capsys.readouterr().out


def test_a_merge_replaces_no_file(tmp_path, capsys):
    # The file that --out named was written over, whatever it was.
    part, out = written(tmp_path / "a.json", [row()]), tmp_path / "thesis.json"
    out.write_text("mine")
    with pytest.raises(SystemExit):
        bare.main(["--out", str(out), "--merge", str(part)])
    assert out.read_text() == "mine"
    assert f"error: --out={out}: exists already; expected a new file" in capsys.readouterr().err


def test_options_that_would_be_unused_are_refused(tmp_path, capsys):
    # --merge passed over the others in silence: a revision that was typed was in no record.
    part = written(tmp_path / "a.json", [row()])
    for unused in (["--revision", "x"], ["--parts", "methods"], ["--quick"], ["--traces", "t"]):
        with pytest.raises(SystemExit):
            bare.main(["--out", f"{tmp_path}/out.json", "--merge", str(part), *unused])
        assert f"error: --merge: leaves {unused[0]} unused; expected one or the other" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bare.main(["--out", f"{tmp_path}/out.json", "--quick", "--parts", "methods"])
    assert "error: --quick: leaves --parts unused" in capsys.readouterr().err


def test_a_process_counts_once_under_whatever_name(tmp_path):
    # A copy or a link doubled every row, and the gate's count with it.
    a = written(tmp_path / "a.json", [row(), row(T=1)])
    shutil.copy(a, tmp_path / "copy.json")
    (tmp_path / "link.json").symlink_to(a)
    longer = written(tmp_path / "longer.json", [row(T=2), row(T=1)])
    for again in (
        a,
        tmp_path / "copy.json",
        tmp_path / "link.json",
        tmp_path / ".." / tmp_path.name / "a.json",
        longer,
    ):
        with pytest.raises(UsageError, match=f"is the same measurement as in --merge={a}; expected other processes'"):
            merged([a, again])
    assert len(merged([a, written(tmp_path / "b.json", [row(time_us=10.5)])])["rows"]) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"revision": "s"}, "its revision is s; expected r, the first's"),
        ({"gpu": "h"}, "its gpu is h; expected g"),
        ({"rows": None}, "expected a record with rows and refused"),
        ({"rows": [], "refused": []}, "is empty; expected a record with rows"),
        ({"rows": 3}, "rows=3: expected a list"),
        ({"rows": [{"method": "ffd"}]}, "row 1: knobs is missing; expected keys and values"),
        ({"rows": [None]}, "row 1: expected method, knobs"),
        ({"refused": ["x"]}, "refusal 1: expected refused, reason, wrong"),
        ({"refused": [{"refused": ["x"], "reason": "y", "wrong": False}]}, 'refusal 1: refused=["x"]: expected text'),
        ({"refused": [{"refused": "x", "reason": "y", "wrong": "no"}]}, 'wrong="no": expected true or false'),
        ({"date": None}, "date is missing; expected a date"),
        ({"date": 3}, "date=3: expected a date"),
        ({"date": "today"}, 'date="today": expected a date'),
        ({"versions": "x"}, 'versions="x": expected names and versions'),
        ({stored.ROOF: 0}, f"{stored.ROOF}=0: expected a finite number > 0"),
        ({stored.ROOF: "x"}, f'{stored.ROOF}="x": expected a finite number > 0'),
    ],
)
def test_records_of_other_machines_or_kinds_are_refused(tmp_path, changes, said):
    # A damaged value was a traceback, or a record with it.
    a, b = (written(tmp_path / name, [row(method=name)]) for name in ("a.json", "b.json"))
    with pytest.raises(UsageError) as error:
        merged([a, changed(b, **changes)])
    assert str(error.value).startswith(f"--merge={b}: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_revision_without_a_name_is_no_revision(tmp_path):
    # Measuring refuses to continue it: two of them may be of different code.
    paths = [changed(written(tmp_path / name, [row(method=name)]), revision="unknown") for name in ("a", "b")]
    with pytest.raises(UsageError, match="its revision is unknown; expected one that was named by --revision"):
        merged(paths)


def test_a_file_that_is_not_there_or_damaged_is_said_to_be_so(tmp_path, capsys):
    # A missing one was "expected a record", a damaged one advised another `out=`, which the command has not.
    a, damaged = written(tmp_path / "a.json", [row()]), tmp_path / "damaged.json"
    contents = {damaged: '{"rows"', tmp_path / "binary": "\0", tmp_path / "deep": "[" * 100000}
    for path, content in contents.items():
        path.write_text(content)
    for path in (*contents, tmp_path):
        with pytest.raises(UsageError, match=rf"^--merge={path}: damaged \(\w+\); expected a record of this command$"):
            merged([a, path])
    with pytest.raises(SystemExit):
        bare.main(["--out", f"{tmp_path}/none.json", "--merge", f"{tmp_path}/absent.json"])
    assert f"--merge={tmp_path}/absent.json: does not exist" in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()


class TestRowsReadBack:
    """Every field of a stored row is looked at."""

    def test_every_field_has_a_check(self):
        assert list(stored.ROW) == [field.name for field in fields(Row)]

    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("time_us", ["x", None, float("nan"), float("inf"), -1.0, 0, True, 10**400]),
            ("floor_us", ["x", -1.0, float("nan")]),
            ("best_dense_us", ["x", 0.0]),
            ("T", ["x", 1.5, 0, True, None]),
            ("step", [None, "attend", [], [1]]),
            ("kept_target", ["x", 0, 1.5]),
            ("kept", [None, 1.5]),
            ("rel_error", [None, -0.1, 0.5]),
            ("ledger_error", [0.5]),
            ("method", [["x"], "", None]),
            ("knobs", [None, []]),
            ("dtype", ["int8"]),
            ("timing", ["clock"]),
            ("l2", [1]),
            ("source", [None]),
            ("beside", ["dense", [1]]),
            ("foo", [1]),
        ],
    )
    def test_a_damaged_field_is_named(self, field, values):
        for value in values:
            with pytest.raises(UsageError, match=f"^here: {field}[=:]"):
                stored.row({**row().as_dict(), field: value}, "here")

    def test_what_is_written_is_read(self):
        one = row(beside=["dense", "sdpa_flash"], kept_target=None, sdpa_flash_us=None, best_dense_us=None, bytes=0.0)
        assert stored.row(json.loads(json.dumps(one.as_dict())), "") == one

    def test_the_committed_record_is_readable(self):
        found = stored.read_record(COMMITTED, "here")
        assert found.merged
        assert len(found.rows) == json.loads(COMMITTED.read_text())["gate"]["rows"]
        assert all(one.beside for one in found.rows)

    def test_a_row_of_before_baselines_were_named_is_read(self):
        old = {name: value for name, value in row().as_dict().items() if name != "beside"}
        assert stored.row(old, "here").beside is None
