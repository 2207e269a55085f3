"""``python -m experiments.throughput --out FILE``: rows of random weights as one JSON record.

Needs torch and transformers only, so that it runs on a bare GPU machine; ``python run.py runner=throughput``
measures the same rows under the run store.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from typing import Any

import torch

from experiments.bare import record_path, require_new, share, whole, write_record
from experiments.engines import prefill_chunk
from experiments.environment import device_class, git_revision, versions
from experiments.errors import UsageError
from experiments.kernel.timing import read_bandwidth
from experiments.throughput.bench import Bench
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
from experiments.throughput.demanded import require_fusable, require_fused
from experiments.throughput.measure import measure
from experiments.throughput.models import GEOMETRIES, SMALL, random_model
from experiments.throughput.summary import break_even, line
from ffd.executor import ExecutorError
from ffd.methods import KnobError, create, method_names
from ffd.support import SettingError, UnsupportedModelError


def point(text: str) -> tuple[int, int]:
    """Parse ``BxT``."""
    batch, _, tokens = text.partition("x")
    if not (batch.isdecimal() and tokens.isdecimal() and int(batch) and int(tokens)):
        raise argparse.ArgumentTypeError(f"{text}: expected BxT with both at least 1, e.g. 1x16384")
    return int(batch), int(tokens)


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m experiments.throughput", description=__doc__)
    parser.add_argument("--out", type=record_path, required=True, help="JSON record to write")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama31_8b", help="of the random model")
    parser.add_argument("--grid", type=point, nargs="+", default=list(DEFAULT_POINTS), help="points as BxT: 1x16384")
    paper = list(DEFAULT_TRANSFORMERS_POINTS)
    parser.add_argument("--paper-grid", type=point, nargs="*", default=paper, help="those for transformers' loop too")
    parser.add_argument("--methods", choices=method_names(), nargs="*", default=["ffd"], help="beside dense")
    parser.add_argument("--kept", type=share, nargs="+", default=list(DEFAULT_KEPT), help="kept fractions of FFD")
    parser.add_argument("--fuse", choices=FUSE, nargs="+", default=["auto"], help="of the engine")
    parser.add_argument(
        "--prefill-tokens", type=whole(0), default=DEFAULT_PREFILL_TOKENS, help="longest prefill to time; 0: none"
    )
    parser.add_argument("--revision", default=None, help="revision, where there is no checkout")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the grid and write the record after every row, so that an interruption loses none."""
    parser = command_line()
    given = parser.parse_args(arguments)
    try:
        require_new(given.out)
    except UsageError as error:
        parser.error(str(error))
    gpu = torch.cuda.is_available()
    if not gpu and given.geometry not in SMALL:
        parser.error(f"--geometry={given.geometry}: needs a GPU; expected {', '.join(SMALL)} without one")
    device, dtype = ("cuda", "bfloat16") if gpu else ("cpu", "float32")
    bandwidth = read_bandwidth(device) * 1e6
    record: dict[str, Any] = {
        "gpu": device_class(),
        "versions": versions(("torch", "triton", "transformers")),
        "revision": given.revision or git_revision()["commit"],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": f"{given.geometry} geometry, random weights, {dtype}",
        "read_bandwidth": bandwidth,
        "rows": [],
        "break_even": [],
    }
    grid = Grid(
        points=given.grid,
        kept=given.kept,
        protocols=PROTOCOLS if gpu else (FAIR,),
        fuse=given.fuse,
        prefill_tokens=given.prefill_tokens,
        transformers_points=given.paper_grid,
    )
    try:
        planned = list(cases(grid, [create(name) for name in given.methods]))
        require_fusable(planned, device, dtype)
        bench = Bench(
            random_model(given.geometry, device, dtype),
            device_class(),
            bandwidth,
            prefill_chunk=prefill_chunk(None, device),
        )
        require_fused(planned, bench)
        for row in measure(bench, planned):
            record["rows"].append(row)
            record["break_even"] = break_even(record["rows"])
            write_record(given.out, record)
            print(line(row), flush=True)
    except SettingError as error:
        parser.error(f"--{error.setting}=true: {error.reason}; expected auto or false")
    except (UnsupportedModelError, ExecutorError, KnobError) as error:
        parser.error(f"{error}; {len(record['rows'])} rows are in {given.out}")
    for found in record["break_even"]:
        print(found["says"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
