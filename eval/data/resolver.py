"""From a source's name to a path: override, cache, or fetch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from eval.data import store
from eval.data.errors import SourceUnavailable
from eval.data.fetch import fetch, time_limit
from eval.data.sources import Source, lookup, siblings


def resolve(name: str, overrides: Mapping[str, str | Path] | None = None) -> Path:
    """Path of a source's file or folder, fetched first where it is not at hand.

    Looked for in this order: `overrides`, the environment variable ``FFD_DATA_<NAME>``, the cache,
    the origin in the table. A fetch is announced on standard error. Processes that ask for the same
    origin at the same time wait for the first one instead of fetching again.

    Parameters
    ----------
    name : str
        Name in `eval.data.SOURCES`, e.g. ``ruler/essays``.
    overrides : mapping of str to path, optional
        Local copies by source name. They are taken as they are: `is_pinned` tells whether one
        holds the pinned bytes.

    Raises
    ------
    UnknownSource
        The table has no such name.
    SourceUnavailable
        A local copy is missing, the origin cannot be reached within a bounded time, or the cache
        cannot be written.
    ChecksumMismatch
        The bytes fetched or cached are not the pinned ones.
    """
    source = lookup(name)
    local = _override(source, overrides or {})
    if local is not None:
        return local
    if store.is_cached(source):
        store.check(source)
    else:
        refetch(source, only_if_absent=True)
    return store.item_path(source)


def at_hand(name: str) -> bool:
    """Whether `resolve` would fetch nothing: a local copy is named, or the cache has the source."""
    source = lookup(name)
    return bool(os.environ.get(source.variable)) or store.is_cached(source)


def is_pinned(name: str, path: Path) -> bool:
    """Whether a path (say, an override) holds exactly the pinned bytes of a source.

    A source pinned as an archive is recognised in the cache only.
    """
    source = lookup(name)
    if path == store.item_path(source):
        return True
    if not source.files:
        return False
    for file in source.files:
        candidate = path / file.name if source.is_folder else path
        if not candidate.is_file() or store.sha256_of(candidate) != file.sha256:
            return False
    return True


def refetch(source: Source, *, only_if_absent: bool = False) -> None:
    """Fetch a source's origin and install every source that lives in it.

    Parameters
    ----------
    only_if_absent : bool
        Do nothing if the source is in the cache once the lock is held (another process brought it).
    """
    family = siblings(source)
    size = source.origin.download_size
    try:
        # Labelled by the first sibling: one lock and one staging folder per origin.
        with store.exclusive(family[0].name.replace("/", "-"), timeout=2 * time_limit(size)) as staging:
            if only_if_absent and store.is_cached(source):
                return
            # What is already cached stays: another process may be reading it.
            wanted = [s for s in family if s == source or not (only_if_absent and store.is_cached(s))]
            names = ", ".join(other.name for other in wanted)
            print(f"ffd: fetching {names} from {source.origin} ({size / 1e6:.1f} MB)", file=sys.stderr, flush=True)
            folders = fetch(source, wanted, staging)
            for sibling in wanted:
                store.install(folders[sibling.name], store.item_folder(sibling))
    except TimeoutError as error:
        raise SourceUnavailable(
            source.name, f"{error}; let it finish or end it, or set {source.variable} to a local copy"
        ) from None
    except OSError as error:
        raise SourceUnavailable(
            source.name,
            f"cannot write the cache {store.cache_root()} ({error.strerror or error}); "
            "make room there or set FFD_CACHE",
        ) from None


def _override(source: Source, overrides: Mapping[str, str | Path]) -> Path | None:
    given: str | Path | None = overrides.get(source.name)
    label = f"override of {source.name}"
    if given is None:
        given = os.environ.get(source.variable)
        label = source.variable
    if not given:
        return None
    path = Path(given).expanduser()
    wanted = "folder" if source.is_folder else "file"
    if not (path.is_dir() if source.is_folder else path.is_file()):
        raise SourceUnavailable(source.name, f"{label}={path} is not a {wanted}; give the path of a local copy")
    return path
