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

from experiments.bare import record_path, require_new, write_record
from experiments.errors import UsageError, one_line
from experiments.kernel.grid import Point, point
from experiments.kernel.measure import PointRun
from experiments.kernel.merge import merged
from experiments.kernel.record import line, problem, record
from experiments.kernel.session import Session
from experiments.kernel.source import Step, captured
from experiments.kernel.standard import FFD_KNOBS, PARTS, quick, standard
from experiments.kernel.stored import Stored, read_record
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


def continued(path: Path, machine: dict[str, Any]) -> Stored | None:
    """An earlier record of the same machine and revision to continue; None where there is no file.

    Raises
    ------
    UsageError
        If the file is anything else: it would be lost.
    """
    if not path.exists():
        return None
    earlier = read_record(path, f"--out={path}")
    for key, value in machine.items():
        if earlier.machine[key] != value or value == "unknown":
            found = earlier.machine[key]
            raise UsageError(f"--out={path}: its {key} is {found}; expected {value}, named, or a new file")
    if earlier.merged:
        raise UsageError(f"--out={path}: was put together by --merge; expected a record of one --out, or a new file")
    return earlier


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m experiments.kernel", description=__doc__)
    parser.add_argument("--out", type=record_path, required=True)
    parser.add_argument("--revision", help="commit that is measured")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="parts of the grid, in order; all by default")
    parser.add_argument("--quick", action="store_true", help="three lengths and kept fractions, FFD alone")
    parser.add_argument("--traces", type=Path, nargs="+", help="trace files to replay as well")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing: put these records together")
    return parser


def refuse_unused(options: argparse.Namespace) -> None:
    """Raise `UsageError` for an option that another one would leave unused."""
    for option, unused in (("merge", ("revision", "parts", "quick", "traces")), ("quick", ("parts", "traces"))):
        given = [f"--{name}" for name in unused if getattr(options, name)]
        if getattr(options, option) and given:
            raise UsageError(f"--{option}: leaves {', '.join(given)} unused; expected one or the other")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the record; returns the exit code, 1 where the gate refused a timing."""
    parser = command_line()
    options = parser.parse_args(arguments)
    try:
        refuse_unused(options)
        if options.merge:
            require_new(options.out)
            made = merged(options.merge)
            write_record(options.out, made)
            return verdict(made)
        if not torch.cuda.is_available():
            raise UsageError("needs a GPU")
        machine = {
            "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "revision": options.revision or "unknown",
        }
        planned = points(options.parts or PARTS, options.traces or ())
        plan = ((one, None) for one in quick()) if options.quick else planned
        return measure(plan, options.out, machine, "cuda")
    except UsageError as error:
        parser.error(str(error))


def measure(plan: Iterable[tuple[Point, list[Step] | None]], out: Path, machine: dict[str, Any], device: str) -> int:
    """Add what is missing to the record, writing it after every row; returns the exit code."""
    earlier = continued(out, machine)
    bandwidth = earlier.bandwidth if earlier else read_bandwidth(device)
    session = Session((*earlier.rows, *earlier.refused) if earlier else ())

    def written() -> dict[str, Any]:
        made = record(session.rows, session.refused, bandwidth, machine)
        write_record(out, made)
        return made

    started = time.perf_counter()
    for one, steps in plan:
        for item in PointRun(one, bandwidth, device, captured=steps, session=session).rows():
            written()
            print(f"[{time.perf_counter() - started:.0f} s] {line(item)}", flush=True)
    made = written()
    print("us per 1000 tokens:", made["slopes_us_per_1000_tokens"])
    return verdict(made)


def verdict(made: dict[str, Any]) -> int:
    """Print the gate's results; returns the exit code."""
    why, error = problem(made), made["gate"]["max_rel_error"]
    print("gate:", why or ("passed" if error is None else f"passed, largest error {error:.2g}"))
    return 0 if why is None else 1


if __name__ == "__main__":
    raise SystemExit(main())
