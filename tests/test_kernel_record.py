"""What rows of the kernel runner say together."""

from __future__ import annotations

import json
from dataclasses import replace

from experiments.kernel import record, stored
from experiments.kernel.rows import Refusal
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
            assert "keep = 1" in record.problem(record.record([broken], [], 1.0, {}))

    def test_a_refusal_of_the_gate_is_a_problem_and_an_absent_baseline_is_none(self):
        absent = Refusal("flashinfer B=1", "not installed", wrong=False)
        wrong = Refusal("ffd B=1", "output differs", True)
        assert record.problem(record.record([row()], [absent], 1.0, {})) is None
        assert "ffd B=1: output differs" in record.problem(record.record([row()], [absent, wrong], 1.0, {}))

    def test_the_record_has_the_fields_that_the_issue_lists(self):
        made = record.record([row()], [], 4.5e6, {"gpu": "g", "versions": {}, "revision": "r"})
        assert {"gpu", "versions", "revision", "date", "rows", "gate", "slopes_us_per_1000_tokens"} <= made.keys()
        fields = {
            "method", "storage", "B", "T", "Hq", "Hkv", "d", "dtype", "kept_target", "kept", "source", "timing", "l2",
            "step", "time_us", "bytes", "floor_us", "efficiency", "sdpa_flash_us", "best_dense_us", "rel_error",
        }  # fmt: skip
        assert fields <= made["rows"][0].keys()
        assert stored.row(json.loads(json.dumps(made))["rows"][0], "") == row()

    def test_labels_tell_apart_all_that_is_timed(self):
        rows = [row(), row(T=1), row(kept_target=0.5), row(timing="eager"), row(l2="hot"), row(trace="a row 0"),
                row(step=["reduce"]), row(method="quest"), row(dtype="float16")]  # fmt: skip
        assert len({r.label for r in rows}) == len(rows)
