"""The kernel runner: one decode step of one layer over a grid of shapes and kept fractions, as a JSON record.

``python -m experiments.kernel --out analysis/measurements/kernel-h200.json`` needs torch and triton
only, so that it runs on a bare GPU machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from experiments import kernel_bench as bench
from ffd.methods.ffd import FFD


@dataclass(frozen=True)
class Grid:
    """What is measured: every kept fraction at every batch size and length that fits."""

    batch_sizes: tuple[int, ...] = (1, 8)
    lengths: tuple[int, ...] = (4096, 16384, 32768, 65536, 131072, 262144)
    kept: tuple[float, ...] = (0.02, 0.05, 0.18, 0.27, 1.0)
    off_block: int = 64
    """Tokens taken off each length, so that the step has a tail."""
    most_tokens: int = 1 << 19
    """Batch size times length beyond which a point is left out: buffers of several layers must fit the GPU."""

    def shapes(self) -> Iterator[bench.Shape]:
        """Points of the grid, short ones first."""
        for b in self.batch_sizes:
            for length in self.lengths:
                if b * length <= self.most_tokens:
                    yield bench.Shape(b, length - self.off_block)


def slope(rows: Sequence[bench.Row]) -> float:
    """Least-squares slope of time against T in us per 1000 tokens (the paper's "lower slope")."""
    x = torch.tensor([row.T / 1000 for row in rows], dtype=torch.float64)
    y = torch.tensor([row.time_us for row in rows], dtype=torch.float64)
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())


def measure(grid: Grid, method: FFD, stages: bool) -> tuple[list[bench.Row], float]:
    """Rows of the whole grid and the read bandwidth in bytes per us that their floors use."""
    bandwidth = bench.read_bandwidth()
    rows: list[bench.Row] = []
    for shape in grid.shapes():
        dense_rows = list(bench.time_dense(shape, bandwidth))
        rows += dense_rows
        dense = {row.method: row.time_us for row in dense_rows if row.method != "dense"}
        print(shape, {row.method: round(row.time_us, 1) for row in dense_rows}, flush=True)
        torch.cuda.empty_cache()
        for kept in grid.kept:
            if kept * shape.T < 2 * method.block_size:
                continue  # below two blocks' worth the target cannot be met
            ffd_rows = list(bench.time_ffd(shape, kept, method, bandwidth, dense, stages and shape.B == 1))
            rows += ffd_rows
            row = ffd_rows[0]
            assert row.sdpa_flash_us is not None
            print(
                f"  kept {row.kept:.3f}: {row.time_us:.1f} us, efficiency {row.efficiency:.2f}, "
                f"{row.sdpa_flash_us / row.time_us:.2f}x SDPA-flash, stages "
                + ", ".join(f"{'+'.join(r.step)} {r.time_us:.1f}" for r in ffd_rows[1:]),
                flush=True,
            )
            torch.cuda.empty_cache()
    return rows, bandwidth


def whole_steps(rows: Sequence[bench.Row], method: str, kept: float) -> list[bench.Row]:
    """Whole-step rows at batch size 1 of one method and kept fraction."""
    return [
        r
        for r in rows
        if r.method == method and r.kept_target == kept and r.B == 1 and {"attend", "reduce"} <= set(r.step)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the record; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--revision", default="unknown", help="commit that was measured")
    parser.add_argument("--stages", action="store_true", help="also time every launch alone")
    parser.add_argument("--quick", action="store_true", help="three lengths, three kept fractions, batch size 1")
    options = parser.parse_args(arguments)
    grid = Grid((1,), (16384, 65536, 262144), (0.02, 0.18, 1.0)) if options.quick else Grid()
    rows, bandwidth = measure(grid, FFD(delta=5.0), options.stages)
    slopes: dict[str, Any] = {"sdpa_flash": slope(whole_steps(rows, "sdpa_flash", 1.0))}
    slopes["dense"] = slope(whole_steps(rows, "dense", 1.0))
    slopes |= {f"ffd kept {kept}": slope(whole_steps(rows, "ffd", kept)) for kept in grid.kept}
    print("us per 1000 tokens:", {name: round(value, 4) for name, value in slopes.items()})
    record = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "revision": options.revision,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "read_bandwidth_bytes_per_us": round(bandwidth),
        "slopes_us_per_1000_tokens": slopes,
        "gate": {
            "checked": "every timed layer: output against the fp32 reference, ledger equal to its recount",
            "max_rel_error": max(row.rel_error for row in rows),
        },
        "rows": [bench.record(row) for row in rows],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
