"""The cache on disk: where an item lives, how it is checked, and who may write it.

An item is a folder ``<root>/data/<name>/<content key>`` with its files and a manifest. It appears
under that name only when complete (one rename), and only the holder of its origin's lock writes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from eval.data.errors import ChecksumMismatch
from eval.data.sources import Source

MANIFEST = "manifest.json"


def cache_root() -> Path:
    """``FFD_CACHE`` if set, else the platform's user cache folder for ``ffd``."""
    chosen = os.environ.get("FFD_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("ffd", appauthor=False)


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """Hex sha256 of a large file anywhere, computed again only when its size or modification time changed."""
    absolute = path.resolve()
    status = absolute.stat()
    stamp = [str(absolute), status.st_size, status.st_mtime_ns]
    note = cache_root() / "checksums" / hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:24]
    try:
        return note.read_text(encoding="ascii")
    except OSError:
        digest = sha256_of(absolute)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_name(f"{note.name}.{os.getpid()}")
        temporary.write_text(digest, encoding="ascii")
        temporary.replace(note)
    except OSError:
        pass  # a cache that cannot be written only costs computing it again
    return digest


@dataclass(frozen=True)
class Entry:
    """What the manifest records of one file."""

    sha256: str
    size: int
    """Bytes."""
    mtime_ns: int
    """Modification time; with the size it tells whether the checksum must be computed again."""


def item_folder(source: Source) -> Path:
    """Folder of an item, present or not."""
    return cache_root() / "data" / source.name / source.key


def item_path(source: Source) -> Path:
    """What `resolve` returns for a cached item: its folder or its single file."""
    folder = item_folder(source)
    return folder if source.is_folder else folder / source.files[0].name


def is_cached(source: Source) -> bool:
    """Whether the item was completely installed (its files are not looked at)."""
    return (item_folder(source) / MANIFEST).is_file()


def cached_bytes(source: Source) -> int:
    """Bytes the item takes in the cache."""
    return sum(entry.size for entry in _read_manifest(item_folder(source)).values())


def write_manifest(folder: Path, digests: Mapping[str, str]) -> None:
    """Record the files of a folder: relative name to hex sha256 as found when written."""
    entries = {}
    for name, digest in sorted(digests.items()):
        status = (folder / name).stat()
        entries[name] = asdict(Entry(digest, status.st_size, status.st_mtime_ns))
    temporary = folder / (MANIFEST + ".new")
    temporary.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    temporary.replace(folder / MANIFEST)


def check(source: Source, *, full: bool = False) -> None:
    """Compare a cached item with its manifest.

    Parameters
    ----------
    full : bool
        Recompute every checksum; otherwise only of files whose size or modification time changed.

    Raises
    ------
    ChecksumMismatch
        For the first file whose bytes are not the pinned ones, or that is gone.
    """
    folder = item_folder(source)
    recorded = _read_manifest(folder)
    pinned = {file.name: file.sha256 for file in source.files} or {name: e.sha256 for name, e in recorded.items()}
    hint = f"`python -m eval.data fetch --force {source.name}` replaces it"
    touched = False
    for name, expected in pinned.items():
        path = folder / name
        if not path.is_file():
            raise ChecksumMismatch(source.name, path, expected, "no such file", hint)
        status = path.stat()
        entry = recorded.get(name)
        unchanged = entry == Entry(expected, status.st_size, status.st_mtime_ns)
        if unchanged and not full:
            continue
        actual = sha256_of(path)
        if actual != expected:
            raise ChecksumMismatch(source.name, path, expected, actual, hint)
        touched = touched or not unchanged
    if touched:
        write_manifest(folder, pinned)


@contextmanager
def exclusive(label: str, timeout: float) -> Iterator[Path]:
    """Hold the lock of one origin and lend an empty staging folder on the cache's file system.

    A folder left by a process that was killed is removed first: the lock proves it has no owner.

    Raises
    ------
    TimeoutError
        If another process holds the lock for longer than `timeout` seconds.
    """
    import filelock

    root = cache_root()
    staging = root / "staging" / label
    (root / "locks").mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(root / "locks" / f"{label}.lock", timeout=timeout):
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            try:
                yield staging
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except filelock.Timeout:
        raise TimeoutError(f"another process has held {label}.lock for {timeout:.0f} s") from None


def install(staged: Path, folder: Path) -> None:
    """Move a complete staged folder to its final name, replacing what stood there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    staged.replace(folder)


def _read_manifest(folder: Path) -> dict[str, Entry]:
    try:
        raw = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {name: Entry(**entry) for name, entry in raw.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # an unreadable manifest makes `check` compute the pinned checksums again
