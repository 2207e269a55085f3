"""What rows of the kernel runner say together, and records of several processes as one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.errors import UsageError
from experiments.kernel import __main__ as bare
from experiments.kernel import record
from experiments.kernel.merge import merged
from experiments.kernel.rows import Refusal, Row
from tests.kernel_steps import row


class TestRecord:
    """What rows say together."""

    def test_slopes_are_fitted_per_method_and_kept_fraction(self):
        rows = [row(T=T, time_us=3 + T / 500) for T in (1000, 2000, 4000)]
        rows += [row(T=T, time_us=99.0, timing="eager") for T in (1000, 2000, 4000)]
        rows += [row(T=T, kept_target=0.02) for T in (1000, 2000)]
        assert record.slopes(rows) == {"ffd kept 0.18": 2.0}

    def test_the_guard_against_regret_looks_at_rows_that_keep_everything(self):
        kept = row(kept_target=1.0, kept=1.0)
        assert record.regret_guard([row(), kept])["holds"]
        assert record.regret_guard([kept])["time_over_best_dense"] == [{"B": 1, "T": 4032, "kept": 1.0, "ratio": 0.667}]
        for broken in (replace(kept, kept=0.99), replace(kept, sparse_steps=0.0)):
            assert not record.regret_guard([broken])["holds"]
            assert "keep = 1" in record.problem([broken], [])

    def test_a_refusal_of_the_gate_is_a_problem_and_an_absent_baseline_is_none(self):
        absent = Refusal("flashinfer B=1", "not installed", wrong=False)
        assert record.problem([row()], [absent]) is None
        assert "ffd B=1: output differs" in record.problem(
            [row()], [absent, Refusal("ffd B=1", "output differs", True)]
        )

    def test_the_record_has_the_fields_that_the_issue_lists(self):
        made = record.record([row()], [], 4.5e6, {"gpu": "g", "versions": {}, "revision": "r"})
        assert {"gpu", "versions", "revision", "date", "rows", "gate", "slopes_us_per_1000_tokens"} <= made.keys()
        fields = {
            "method", "storage", "B", "T", "Hq", "Hkv", "d", "dtype", "kept_target", "kept", "source", "timing", "l2",
            "step", "time_us", "bytes", "floor_us", "efficiency", "sdpa_flash_us", "best_dense_us", "rel_error",
        }  # fmt: skip
        assert fields <= made["rows"][0].keys()
        assert Row.from_dict(json.loads(json.dumps(made))["rows"][0]) == row()

    def test_labels_tell_apart_all_that_is_timed(self):
        rows = [row(), row(T=1), row(kept_target=0.5), row(timing="eager"), row(l2="hot"), row(trace="a row 0"),
                row(step=["reduce"]), row(method="quest"), row(dtype="float16")]  # fmt: skip
        assert len({r.label for r in rows}) == len(rows)


class TestMerge:
    """Records of several processes as one."""

    def stored(self, path: Path, rows: list[Row], roof: float) -> Path:
        refused = [Refusal("flashinfer B=1", "not installed", wrong=False)]
        machine = {"gpu": "g", "versions": {"torch": "2"}, "revision": "r"}
        path.write_text(json.dumps(record.record(rows, refused, roof, machine)))
        return path

    def test_rows_keep_the_baselines_of_their_process_and_slopes_take_the_first(self, tmp_path):
        a = self.stored(tmp_path / "a.json", [row(T=T, time_us=T / 500) for T in (1000, 2000, 4000)], 4e6)
        b = self.stored(tmp_path / "b.json", [row(T=1000, time_us=50.0, best_dense_us=9.0), row(method="quest")], 5e6)
        made = merged([a, b])
        assert [r["best_dense_us"] for r in made["rows"]] == [15.0, 15.0, 15.0, 9.0, 15.0]
        assert made["slopes_us_per_1000_tokens"] == {"ffd kept 0.18": 2.0}
        assert (made["read_bandwidth_bytes_per_us"], len(made["refused"])) == (4e6, 1)
        assert "2 processes (read bandwidth 4000000, 5000000 bytes per us)" in made["note"]
        assert merged([self.stored(tmp_path / "c.json", [row()], 4e6)])["rows"] == [row().as_dict()]

    def test_the_command_measures_nothing(self, tmp_path, capsys):
        parts = [self.stored(tmp_path / name, [row(method=name)], 4e6) for name in ("a", "b")]
        assert bare.main(["--out", f"{tmp_path}/both.json", "--merge", *map(str, parts)]) == 0
        assert [r["method"] for r in json.loads((tmp_path / "both.json").read_text())["rows"]] == ["a", "b"]
        with pytest.raises(SystemExit):
            bare.main(["--out", f"{tmp_path}/none.json", "--merge", f"{tmp_path}/absent.json"])
        assert f"--merge={tmp_path}/absent.json: expected a record" in capsys.readouterr().err
        assert not (tmp_path / "none.json").exists()

    def test_what_was_wrong_stays_wrong(self, tmp_path):
        a = self.stored(tmp_path / "a.json", [row()], 4e6)
        stored = json.loads(a.read_text())
        stored["refused"].append(Refusal("ffd B=8", "output differs", wrong=True).as_dict())
        a.write_text(json.dumps(stored))
        assert merged([a])["gate"]["wrong"][0]["refused"] == "ffd B=8"

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"revision": "s"}, "its revision is s; expected r, the first's"),
            ({"gpu": "h"}, "its gpu is h; expected g"),
            ({"rows": None}, "expected a record with rows and refused"),
            ({"rows": [{"method": "ffd"}]}, "its rows are of another version"),
            ({"date": None}, None),
        ],
    )
    def test_records_of_other_machines_or_kinds_are_refused(self, tmp_path, changes, said):
        a, b = (self.stored(tmp_path / name, [row()], 4e6) for name in ("a.json", "b.json"))
        stored = {**json.loads(b.read_text()), **changes}
        b.write_text(json.dumps({k: v for k, v in stored.items() if v is not None}))
        with pytest.raises(UsageError, match=said or "expected a record with gpu, versions") as error:
            merged([a, b])
        assert f"--merge={b}" in str(error.value)
        with pytest.raises(UsageError, match="expected a record"):
            merged([a, tmp_path / "absent.json"])
