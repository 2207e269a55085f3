"""Accumulation, merging, files, and the numbers made of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from eval.fidelity import FidelityState, aggregate, histogram, pair_means, summary, table, write_table
from eval.fidelity.accumulate import NAMES
from eval.fidelity.aggregate import percentile
from eval.fidelity.metrics import Observation

LAYERS, HEADS, ROWS = (2, 3), 4, 3


def random_observed(g: torch.Generator) -> dict[str, Observation]:
    shape = (ROWS, HEADS)
    observed = {
        name: Observation(torch.rand(shape, generator=g)) for name in NAMES if name not in ("spearman", "keep_io")
    }
    observed["keep_io"] = Observation(torch.rand(shape, generator=g), weight=torch.tensor([[10.0], [20.0], [70.0]]))
    observed["set_recall_1024"] = Observation(torch.rand(shape, generator=g), None, torch.zeros(shape).bool())
    return observed


def random_state(seed: int, steps: int = 3) -> FidelityState:
    g = torch.Generator().manual_seed(seed)
    state = FidelityState(16, LAYERS, HEADS)
    for step in range(steps):
        active = torch.tensor([True, step < 2, False])
        for layer in range(len(LAYERS)):
            state.add(layer, [random_observed(g)], active)
    return state


def assert_same(a: FidelityState, b: FidelityState, *, exact: bool = True) -> None:
    assert (a.unit, a.layers, a.num_heads, a.dense_calls) == (b.unit, b.layers, b.num_heads, b.dense_calls)
    for name, value in a._tensors().items():
        tolerance = {} if exact or value.dtype == torch.int64 else {"rtol": 1e-15, "atol": 0.0}
        torch.testing.assert_close(value, b._tensors()[name], **(tolerance or {"rtol": 0.0, "atol": 0.0}))


def test_only_active_rows_and_defined_values_count() -> None:
    g = torch.Generator().manual_seed(5)
    observed = random_observed(g)
    observed["lse_error"].value[2] = torch.nan  # of the inactive row
    observed["spearman"] = Observation(torch.tensor([[0.5] * 4, [torch.nan, 0.25, 0.25, 0.25], [9.0] * 4]))
    state = FidelityState(16, LAYERS, HEADS)
    state.add(1, [observed], torch.tensor([True, True, False]))
    assert state.steps.tolist() == [0, 2]
    spearman = NAMES.index("spearman")
    assert state.count[spearman, 1].tolist() == [1, 2, 2, 2]
    assert state.excluded[spearman, 1].tolist() == [1, 0, 0, 0]
    assert pair_means(state, "spearman")[1].tolist() == [0.5, 0.375, 0.375, 0.375]
    assert pair_means(state, "spearman")[0].isnan().all()
    keep = observed["keep_io"].value.double()
    micro = (keep[0].sum() * 10 + keep[1].sum() * 20) / (4 * 30)
    numbers = aggregate(state)["keep_io"]
    assert numbers["micro"] == pytest.approx(float(micro))
    assert numbers["macro"] == pytest.approx(float(keep[:2].mean()))
    assert numbers["max"] == float(keep[:2].max())
    assert summary(state)["lse_error_mean"] == pytest.approx(float(observed["lse_error"].value[:2].double().mean()))


def test_merging_is_associative_has_a_neutral_state_and_equals_one_run() -> None:
    a, b, c = (random_state(seed) for seed in range(3))
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)), exact=False)
    assert_same(a.merge(b), b.merge(a), exact=False)
    empty = FidelityState(16)
    assert_same(empty.merge(a), a)
    assert_same(a.merge(empty), a)
    g = torch.Generator().manual_seed(7)
    whole, parts = FidelityState(16, LAYERS, HEADS), [FidelityState(16, LAYERS, HEADS) for _ in range(2)]
    for step in range(4):
        observed = random_observed(g)
        whole.add(0, [observed], torch.ones(ROWS).bool())
        parts[step // 2].add(0, [observed], torch.ones(ROWS).bool())
    assert_same(parts[0].merge(parts[1]), whole, exact=False)


def test_states_that_do_not_belong_together_are_refused() -> None:
    state = random_state(0)
    with pytest.raises(ValueError, match="unit=32"):
        state.merge(FidelityState(32))
    with pytest.raises(ValueError, match=r"layers=\[0\]"):
        state.merge(FidelityState(16, (0,), HEADS))


def test_a_resumed_run_gives_the_very_same_numbers(tmp_path: Path) -> None:
    samples = [random_state(seed) for seed in range(4)]
    straight = FidelityState(16)
    for sample in samples:
        straight = straight.merge(sample)
    path = tmp_path / "deep" / "fidelity.safetensors"
    samples[0].merge(samples[1]).save(path)
    resumed = FidelityState.load(path)
    for sample in samples[2:]:
        resumed = resumed.merge(sample)
    assert_same(resumed, straight)
    assert summary(resumed) == summary(straight)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_files_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"x\.safetensors: damaged"):
        FidelityState.load(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"x\.safetensors: not a fidelity file"):
        FidelityState.load(path)


def test_percentiles_are_at_most_one_bin_too_high() -> None:
    g = torch.Generator().manual_seed(3)
    state = FidelityState(16, (0,), HEADS)
    values, gaps = [], []
    for _ in range(200):
        lse = torch.exp(torch.randn(ROWS, HEADS, generator=g) * 3 - 6)
        gap = torch.randn(ROWS, HEADS, generator=g)
        state.add(0, [{"lse_error": Observation(lse), "pseudo_max_gap": Observation(gap)}], torch.ones(ROWS).bool())
        values.append(lse)
        gaps.append(gap)
    exact = float(torch.cat(values).flatten().sort().values[int(0.99 * 200 * ROWS * HEADS) - 1])
    got = percentile(state, "lse_error", 0.99)
    assert got is not None
    assert exact <= got <= exact * 1.155
    assert percentile(state, "lse_error", 1.0) == float(torch.cat(values).max().double())
    counts = histogram(state, "pseudo_max_gap")
    bins = [sum(a < float(x) <= b for x in torch.cat(gaps).flatten()) for a, b in ((-1, -0.75), (0, 0.25))]
    edges = counts["edges"]
    assert [counts["counts"][edges.index(edge) + 1] for edge in (-1.0, 0.0)] == bins


def test_distribution_over_pairs() -> None:
    state = FidelityState(16, LAYERS, HEADS)
    values = torch.arange(8.0).view(2, 4) / 8
    for layer in range(2):
        state.add(layer, [{"keep_head": Observation(values[layer][None])}], torch.ones(1).bool())
    pairs = aggregate(state)["keep_head"]["pairs"]
    assert pairs == pytest.approx(
        {
            "min": 0,
            "p5": 0.35 / 8,
            "p50": 3.5 / 8,
            "p95": 6.65 / 8,
            "max": 7 / 8,
            "std": float(values.std(correction=0)),
        }
    )


def test_nulls_have_reasons_and_everything_is_json() -> None:
    empty = summary(FidelityState(16))
    assert empty["mass_recall"] is None
    assert empty["null_reasons"]["mass_recall"] == "no decode step was probed"
    dense = FidelityState(16)
    dense.dense_calls = 3
    assert summary(dense)["null_reasons"]["lse_error_max"] == "all layers are dense by configuration"
    state = random_state(0)
    numbers = summary(state)
    assert numbers["spearman"] is None
    assert "no estimate" in numbers["null_reasons"]["spearman"]
    assert {key for key, value in numbers.items() if value is None} == set(numbers["null_reasons"])
    assert "NaN" not in json.dumps([numbers, aggregate(state), table(state), empty])


def test_one_bad_output_is_not_averaged_away() -> None:
    state = random_state(0)
    observed = random_observed(torch.Generator().manual_seed(0))
    observed["output_rel_error"].value[0, 1] = torch.nan
    state.add(0, [observed], torch.ones(ROWS).bool())
    numbers = summary(state)
    assert numbers["output_rel_error"] is None
    assert "in 1 of" in numbers["null_reasons"]["output_rel_error"]
    assert aggregate(state)["output_rel_error"]["pairs"]["max"] is None


def test_the_table_has_a_row_per_pair(tmp_path: Path) -> None:
    state = random_state(0)
    rows = table(state)
    assert [(row["layer"], row["head"]) for row in rows] == [(layer, head) for layer in LAYERS for head in range(HEADS)]
    assert rows[5]["mass_recall"] == float(pair_means(state, "mass_recall")[1, 1])
    path = tmp_path / "fidelity.csv"
    write_table(path, rows)
    with path.open() as file:
        read = list(csv.DictReader(file))
    assert float(read[5]["mass_recall"]) == rows[5]["mass_recall"]
    assert read[5]["spearman"] == ""
