"""``python -m experiments.throughput --out FILE``: rows of random weights as one JSON record.

Needs torch and transformers only, so that it runs on a bare GPU machine; ``python run.py runner=throughput``
measures the same rows under the run store.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.engines import GPU_PREFILL_CHUNK
from experiments.environment import device_class, git_revision, versions
from experiments.kernel.timing import read_bandwidth
from experiments.throughput.bench import Bench, measure
from experiments.throughput.cases import (
    DEFAULT_KEPT,
    DEFAULT_POINTS,
    DEFAULT_PREFILL_TOKENS,
    DEFAULT_TRANSFORMERS_POINTS,
    FAIR,
    FUSE,
    PROTOCOLS,
    Grid,
    cases,
)
from experiments.throughput.models import GEOMETRIES, random_model
from experiments.throughput.summary import break_even, line
from ffd.methods import create, method_names


def point(text: str) -> tuple[int, int]:
    """Parse ``BxT``."""
    batch, _, tokens = text.partition("x")
    return int(batch), int(tokens)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m experiments.throughput", description=__doc__)
    found.add_argument("--out", type=Path, required=True, help="JSON record to write")
    found.add_argument("--geometry", choices=GEOMETRIES, default="llama31_8b", help="of the random model")
    found.add_argument("--grid", type=point, nargs="+", default=list(DEFAULT_POINTS), help="points as BxT: 1x16384")
    found.add_argument("--paper-grid", type=point, nargs="*", default=list(DEFAULT_TRANSFORMERS_POINTS))
    found.add_argument("--methods", choices=method_names(), nargs="*", default=["ffd"], help="beside dense")
    found.add_argument("--kept", type=float, nargs="+", default=list(DEFAULT_KEPT), help="kept fractions of FFD")
    found.add_argument("--fuse", choices=FUSE, nargs="+", default=["auto"], help="of the engine")
    found.add_argument("--prefill-tokens", type=int, default=DEFAULT_PREFILL_TOKENS, help="longest prefill to time")
    found.add_argument("--revision", default=None, help="revision, where there is no checkout")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the grid and write the record after every row, so that an interruption loses none."""
    given = parser().parse_args(arguments)
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", "bfloat16") if gpu else ("cpu", "float32")
    bandwidth = read_bandwidth(device) * 1e6
    record: dict[str, Any] = {
        "gpu": device_class(),
        "versions": versions(("torch", "triton", "transformers")),
        "revision": given.revision or git_revision()["commit"],
        "date": datetime.date.today().isoformat(),
        "model": f"{given.geometry} geometry, random weights, {dtype}",
        "read_bandwidth": bandwidth,
        "rows": [],
        "break_even": [],
    }
    bench = Bench(
        random_model(given.geometry, device, dtype),
        device_class(),
        bandwidth,
        prefill_chunk=GPU_PREFILL_CHUNK if gpu else None,
    )
    grid = Grid(
        points=given.grid,
        kept=given.kept,
        protocols=PROTOCOLS if gpu else (FAIR,),
        fuse=given.fuse,
        prefill_tokens=given.prefill_tokens,
        transformers_points=given.paper_grid,
    )
    for row in measure(bench, cases(grid, [create(name) for name in given.methods])):
        record["rows"].append(row)
        record["break_even"] = break_even(record["rows"])
        given.out.write_text(json.dumps(record, indent=1) + "\n")
        print(line(row), flush=True)
    for found in record["break_even"]:
        print(found["says"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
