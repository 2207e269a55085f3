"""``python -m eval.data fetch|list|verify``: look after the cache of external data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from eval.data import sources as table
from eval.data import store
from eval.data.errors import DataError
from eval.data.resolver import refetch, resolve
from eval.data.sources import Source, lookup

SELECTIONS = tuple(sorted({use for source in table.SOURCES.values() for use in source.used_for}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (1 if an item is missing or damaged)."""
    parser = argparse.ArgumentParser(prog="python -m eval.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="bring items into the cache")
    fetching.add_argument("names", nargs="*", metavar="NAME", help="sources by name; default: those of --for default")
    fetching.add_argument("--for", dest="selection", choices=SELECTIONS, help="the items one purpose needs")
    fetching.add_argument("--force", action="store_true", help="fetch again what is already cached")
    commands.add_parser("list", help="show the table of sources and what is cached")
    verifying = commands.add_parser("verify", help="recompute the checksums of cached items")
    verifying.add_argument("names", nargs="*", metavar="NAME", help="sources by name; default: all that are cached")
    options = parser.parse_args(arguments)
    try:
        if options.command == "list":
            return _list()
        if options.command == "verify":
            return _verify(
                [lookup(name) for name in options.names] or list(table.SOURCES.values()), named=options.names
            )
        chosen = [lookup(name) for name in options.names]
        if options.selection or not chosen:
            purpose = options.selection or "default"
            chosen += [source for source in table.SOURCES.values() if purpose in source.used_for]
        return _fetch(list(dict.fromkeys(chosen)), force=options.force)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _fetch(sources: Sequence[Source], *, force: bool) -> int:
    failed = False
    renewed: set[object] = set()
    rows = []
    for source in sources:
        try:
            if force and source.origin not in renewed:
                refetch(source)
                renewed.add(source.origin)
            rows.append((source.name, "ready", str(resolve(source.name))))
        except DataError as error:
            failed = True
            rows.append((source.name, "FAILED", str(error)))
    _table(("name", "state", "path"), rows)
    return int(failed)


def _list() -> int:
    rows = []
    for source in table.SOURCES.values():
        cached = f"{store.cached_bytes(source) / 1e6:.1f} MB" if store.is_cached(source) else "-"
        download = f"{source.origin.download_size / 1e6:.1f} MB"
        uses = ",".join(source.used_for)
        rows.append((source.name, str(source.origin), download, cached, source.sha256[:12], uses, source.licence))
    _table(("name", "origin", "download", "cached", "sha256", "for", "licence"), rows)
    print(f"cache: {store.cache_root()}")
    return 0


def _verify(sources: Sequence[Source], *, named: Sequence[str]) -> int:
    failed = False
    rows = []
    for source in sources:
        if not store.is_cached(source):
            failed = failed or source.name in named
            rows.append((source.name, "absent", ""))
            continue
        try:
            store.check(source, full=True)
            rows.append((source.name, "ok", str(store.item_path(source))))
        except DataError as error:
            failed = True
            rows.append((source.name, "DAMAGED", str(error)))
    _table(("name", "state", "path"), rows)
    return int(failed)


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    raise SystemExit(main())
