"""``python -m experiments.kernel --out analysis/measurements/kernel-h200.json``: the committed record's grid.

Needs torch and triton only. The record is written after every row, and an existing one of the same revision and
GPU is continued.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from experiments.bare import record_path
from experiments.bare import write_record as write
from experiments.errors import UsageError, one_line
from experiments.files import read_json
from experiments.kernel.grid import Point, point
from experiments.kernel.measure import Item, PointRun
from experiments.kernel.merge import contents, merged
from experiments.kernel.record import line, problem, record
from experiments.kernel.rows import Refusal, Row
from experiments.kernel.source import Step, captured
from experiments.kernel.standard import FFD_KNOBS, PARTS, quick, standard
from experiments.kernel.timing import read_bandwidth


def points(parts: Sequence[str], traces: Sequence[Path]) -> Iterator[tuple[Point, list[Step] | None]]:
    """What to time, and the captured steps where keys are not planted."""
    for part in parts:
        for one in standard(part):
            yield one, None
    for path in traces:
        try:
            for shape, steps in captured(path, "cuda"):
                yield point(shape, {**FFD_KNOBS, "dense": {}}, (None,)), steps
        except (OSError, ValueError) as error:
            raise UsageError(f"--traces={path}: {one_line(error)}") from None


def stored(path: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """An earlier record of the same machine and revision to continue, or an empty one where there is no file.

    Raises
    ------
    UsageError
        If the file is anything else: it would be lost.
    """
    earlier = read_json(path)
    if earlier is None:
        return {"rows": [], "refused": []}
    contents(earlier, f"--out={path}")
    for key, value in machine.items():
        if earlier.get(key) != value or value == "unknown":
            raise UsageError(f"--out={path}: its {key} is {earlier.get(key)}; expected {value}, named, or a new file")
    return dict(earlier)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the record; returns the exit code, 1 where the gate refused a timing."""
    parser = argparse.ArgumentParser(prog="python -m experiments.kernel", description=__doc__)
    parser.add_argument("--out", type=record_path, required=True)
    parser.add_argument("--revision", default="unknown", help="commit that is measured")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts of the grid, in order")
    parser.add_argument("--quick", action="store_true", help="three lengths and kept fractions, FFD alone")
    parser.add_argument("--traces", type=Path, nargs="*", default=[], help="trace files to replay as well")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing: put these records together")
    options = parser.parse_args(arguments)
    if options.merge:
        try:
            write(options.out, merged(options.merge))
        except UsageError as error:
            parser.error(str(error))
        return 0
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "revision": options.revision,
    }
    plan = ((one, None) for one in quick()) if options.quick else points(options.parts, options.traces)
    try:
        return measure(plan, options.out, machine, "cuda")
    except UsageError as error:
        parser.error(str(error))


def measure(plan: Iterable[tuple[Point, list[Step] | None]], out: Path, machine: dict[str, Any], device: str) -> int:
    """Add what is missing to the record, writing it after every row; returns the exit code."""
    earlier = stored(out, machine)
    bandwidth = earlier.get("read_bandwidth_bytes_per_us") or read_bandwidth(device)
    rows, earlier_refused = contents(earlier, f"--out={out}")
    refused = [item for item in earlier_refused if not item.wrong]
    done: dict[str, Item] = {row.label: row for row in rows} | {item.label: item for item in refused}
    started = time.perf_counter()
    for one, steps in plan:
        for item in PointRun(one, bandwidth, device, captured=steps, done=done).rows():
            done[item.label] = item
            rows += [item] if isinstance(item, Row) else []
            refused += [item] if isinstance(item, Refusal) else []
            write(out, record(rows, refused, bandwidth, machine))
            print(f"[{time.perf_counter() - started:.0f} s] {line(item)}", flush=True)
    made = record(rows, refused, bandwidth, machine)
    write(out, made)
    print("us per 1000 tokens:", made["slopes_us_per_1000_tokens"])
    why = problem(rows, refused)
    print("gate:", why or f"passed, largest error {made['gate']['max_rel_error']:.2g}")
    return 0 if why is None else 1


if __name__ == "__main__":
    raise SystemExit(main())
