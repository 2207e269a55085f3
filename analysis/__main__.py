"""``python -m analysis tables|figures|report|compare|runs|record``: what the stored runs say."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from analysis.load import LoadError, Outputs, Run, load
from analysis.pairing import PairingError
from analysis.sizes import SIZES

FILTERS = ("method", "model", "task", "status")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, 2 for a request that cannot be met."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        outputs = Outputs(Path(), {}, (), ()) if options.out is None else load(options.out)
        for line in outputs.skipped:
            print(line, file=sys.stderr)
        options.command(outputs, options)
    except (LoadError, PairingError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `python -m analysis runs | head`
        return 0
    except OSError as error:
        print(f"error: {error.filename or 'output'}: cannot be read or written ({error.strerror})", file=sys.stderr)
        return 2
    return 0


def _tables(outputs: Outputs, options: argparse.Namespace) -> None:
    _print(_written_tables(outputs, options.size))


def _figures(outputs: Outputs, options: argparse.Namespace) -> None:
    _print(_written_figures(outputs, options.size))


def _report(outputs: Outputs, options: argparse.Namespace) -> None:
    from analysis.report import write_report

    beside = [*_written_tables(outputs, options.size), *_written_figures(outputs, options.size)]
    if options.verbose:
        _print(beside)
    print(f"{write_report(outputs, options.size)} (beside it {len(beside)} files of its tables and figures)")


def _written_tables(outputs: Outputs, size: str | None) -> list[Path]:
    from analysis.render import write_tables
    from analysis.tables import build_tables

    return write_tables(build_tables(outputs, size), outputs.root / "analysis" / "tables")


def _written_figures(outputs: Outputs, size: str | None) -> list[Path]:
    from analysis.drawing import write_figures
    from analysis.figures import build_figures

    return write_figures(build_figures(outputs, size), outputs.root / "analysis" / "figures")


def _compare(outputs: Outputs, options: argparse.Namespace) -> None:
    from analysis.comparison import compare
    from analysis.terminal import print_comparison

    first, second = (find(outputs, name) for name in (options.run_a, options.run_b))
    print_comparison(compare(first, second, margin=options.margin))


def _runs(outputs: Outputs, options: argparse.Namespace) -> None:
    from analysis.terminal import print_runs

    wanted = {
        key: value for key, value in vars(options).items() if key in ("method", "model", "task", "status") and value
    }
    print_runs([run for run in outputs.runs.values() if all(_attribute(run, k) == v for k, v in wanted.items())])


def _record(outputs: Outputs, options: argparse.Namespace) -> None:
    from analysis.measurements import COMMITTED
    from analysis.record import write_record

    runs = [find(outputs, name) for name in options.runs]
    if Path(options.name).name != options.name:
        raise LoadError(f"{options.name}: expected a name without a folder; --folder says where it is written")
    path = (options.folder or COMMITTED) / f"{options.name}.json"
    print(write_record(path, runs, revision=options.revision, date=options.date, note=options.note))


def _measurements(_: Outputs, options: argparse.Namespace) -> None:
    from analysis.performance import write_measurements

    _print(write_measurements())


def _print(paths: Iterable[Path]) -> None:
    for path in paths:
        print(path)


def find(outputs: Outputs, name: str) -> Run:
    """The run whose id is or begins with ``name``.

    Raises
    ------
    LoadError
        If there is none, or more than one.
    """
    if name in outputs.runs:
        return outputs.runs[name]
    found = [run for run_id, run in outputs.runs.items() if run_id.startswith(name)]
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} runs begin so" if found else "no such run"
    raise LoadError(f"{name}: {what}; python -m analysis runs lists them")


def _attribute(run: Run, name: str) -> str:
    return str(run.method["name"]) if name == "method" else str(getattr(run, name))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m analysis", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--out", type=Path, default=Path("outputs"), help="folder of results (default: outputs)")
    sized = argparse.ArgumentParser(add_help=False, parents=[common])
    sized.add_argument("--size", choices=SIZES, help="size of the recipes to show (default: the largest with results)")
    for name, command, text in (
        ("tables", _tables, "write the paper's tables as Markdown, LaTeX and CSV"),
        ("figures", _figures, "write the paper's figures as SVG with their data"),
    ):
        commands.add_parser(name, help=text, parents=[sized]).set_defaults(command=command)
    report = commands.add_parser("report", help="write tables, figures and one self-contained page", parents=[sized])
    report.add_argument("--verbose", action="store_true", help="name the files of tables and figures too")
    report.set_defaults(command=_report)
    compare = commands.add_parser("compare", help="compare two runs over the same prompts", parents=[common])
    compare.add_argument("run_a", metavar="RUN_A", help="id of a run, or its beginning; usually dense")
    compare.add_argument("run_b", metavar="RUN_B")
    compare.add_argument("--margin", type=float, default=1.0, help="points that still count as no loss (default: 1)")
    compare.set_defaults(command=_compare)
    record = commands.add_parser("record", help="write a record of runs that travels with the code", parents=[common])
    record.add_argument("name", metavar="NAME", help="of the record, e.g. ruler-16k-qwen05b-h200")
    record.add_argument("runs", metavar="RUN", nargs="+", help="id of a run, or its beginning")
    record.add_argument("--revision", help="commit of the runs, where their checkout had no history")
    record.add_argument("--date", required=True, help="day of the runs, e.g. 2026-11-29")
    record.add_argument("--note", help="what a reader of the figures must know")
    record.add_argument("--folder", type=Path, help="where to write (default: analysis/measurements)")
    record.set_defaults(command=_record)
    measured = commands.add_parser("measurements", help="write the README's performance block and its figures")
    measured.set_defaults(command=_measurements, out=None)
    runs = commands.add_parser("runs", help="list runs", parents=[common])
    for name in FILTERS:
        runs.add_argument(f"--{name}")
    runs.set_defaults(command=_runs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
