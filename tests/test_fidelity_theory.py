"""The bound on the scan's error: against brute force, under its own assumptions, and on the command line."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch

from eval.fidelity.noise import ScanNoise, exceedance_by_channels, exceedance_by_margin, scan_noise
from eval.fidelity.traces import Trace
from experiments.theory import main
from ffd import FFD
from ffd.methods import LayerGeometry, RowState

D, HKV, G, TOKENS, BLOCK = 32, 2, 2, 150, 64


def random_trace(d: int = D, tokens: int = TOKENS, seed: int = 0) -> Trace:
    generator = torch.Generator().manual_seed(seed)
    return Trace(
        scale=d**-0.5,
        keys={3: torch.randn(1, HKV, tokens, d, generator=generator)},
        values={},
        queries={3: 3 * torch.randn(2, 1, HKV * G, d, generator=generator)},
        lengths=torch.tensor([[tokens - 1], [tokens]], dtype=torch.int32),
        active=torch.ones(2, 1, dtype=torch.bool),
        prompt_lengths=torch.tensor([tokens - 2], dtype=torch.int32),
    )


def test_errors_are_those_of_the_scan() -> None:
    """The difference of FFD's own estimate and the exact scores, up to the fp16 rounding of its operand."""
    trace = random_trace()
    layer = FFD(block_size=BLOCK).new_layer(
        LayerGeometry(1, HKV * G, HKV, D, TOKENS, torch.float32, torch.device("cpu")),
        RowState.allocate(1, "cpu"),
        "reference",
    )
    layer.rows.lengths.fill_(TOKENS)
    layer.prefill(trace.keys[3], trace.keys[3])
    q, whole = trace.queries[3][1], TOKENS // BLOCK * BLOCK
    exact = torch.einsum("bhgd,bhnd->bhgn", q.unflatten(1, (HKV, G)), trace.keys[3]).flatten(1, 2) * trace.scale
    expected = (exact - layer.select(q, trace.scale).estimate)[0, :, :whole]
    scans = list(scan_noise(trace, block_size=BLOCK, levels="edge", centre=False))
    assert len(scans) == 2 * HKV
    got = torch.cat([scan.error(torch.arange(D)) for scan in scans[HKV:]])
    torch.testing.assert_close(got, expected, rtol=0, atol=0.02)
    assert expected.abs().mean() > 0.3


def test_shares_are_those_of_brute_force() -> None:
    trace = random_trace()
    (row,) = exceedance_by_margin(scan_noise(trace, block_size=BLOCK, levels="edge", centre=False), [0.8])
    beyond, first, bounds, count = 0, 0, 0.0, 0
    for scan in scan_noise(trace, block_size=BLOCK, levels="edge", centre=False):
        for q in scan.queries.double():
            for n, noise in enumerate(scan.noise.double()):
                hit = abs(float(q @ noise)) > 0.8
                beyond, count = beyond + hit, count + 1
                first += hit if n == 0 else 0
                squared = float(q.square() @ scan.mean_square[n // BLOCK].double())
                bounds += min(1.0, 2 * math.exp(-(0.8**2) / (2 * squared)))
    assert row["observed"] == pytest.approx(beyond / count)
    assert row["observed_first_token"] == pytest.approx(first / (2 * HKV * G))
    assert row["bound_measured"] == pytest.approx(bounds / count)


def test_the_bound_holds_and_falls_exponentially_with_independent_noise() -> None:
    def scans():
        generator = torch.Generator().manual_seed(1)
        for _ in range(40):
            noise = torch.rand(256, 128, generator=generator) * 2 - 1
            yield ScanNoise(
                torch.full((2, 128), 0.1), noise, noise.square().mean(dim=0, keepdim=True), torch.ones(1, 128)
            )

    rows = exceedance_by_channels(scans(), [16, 32, 64, 128], margin=2.0)
    for row in rows:
        assert row["observed"] <= row["bound_measured"] * 1.01 <= row["bound_range"] * 1.02
    logs = [math.log(row["bound_measured"]) for row in rows[1:]]
    assert logs[2] - logs[1] == pytest.approx(2 * (logs[1] - logs[0]), rel=0.05)  # linear in the channels
    assert rows[-1]["observed"] < rows[0]["observed"] / 10


def test_centring_shrinks_the_noise_of_keys_that_share_an_offset() -> None:
    trace = random_trace()
    trace.keys[3] += 4.0

    def observed(centre: bool) -> float:
        found = scan_noise(trace, block_size=BLOCK, levels="edge", centre=centre)
        return exceedance_by_margin(found, [1.5])[0]["observed"]

    assert observed(True) < observed(False) / 2


def test_the_command_writes_data_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_trace().save(tmp_path / "traces" / "a.safetensors")
    assert main([str(tmp_path / "traces"), "--out", str(tmp_path / "out"), "--block-size", "64"]) == 0
    for name in ("exceedance_by_margin", "exceedance_by_channels"):
        assert (tmp_path / "out" / f"{name}.svg").exists()
        with (tmp_path / "out" / f"{name}.csv").open() as file:
            assert len(list(csv.DictReader(file))) > 5
    assert main([str(tmp_path / "traces"), "--out", str(tmp_path / "out"), "--block-size", "256"]) == 2
    assert "block_size=256: expected at most the traces' 150 tokens" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
