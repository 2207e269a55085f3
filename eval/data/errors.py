"""What can go wrong between a source's name and a path; each message is one line a user can act on."""

from __future__ import annotations

from pathlib import Path


class DataError(Exception):
    """Base of every error of the data resolver; its text is a single line."""


class UnknownSource(DataError, KeyError):  # noqa: N818 - says what happened
    """A name that is not in the table of sources."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"unknown data source {name!r}; known: {', '.join(known)}")

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr


class SourceUnavailable(DataError):  # noqa: N818 - says what happened
    """A source that cannot be had here: no network, missing override, no space left.

    Attributes
    ----------
    name : str
        Name of the source in the table.
    reason : str
        Why, and what would help, on one line.
    local : str
        How a local copy is named in its place, for those who have no better way; may be empty.
    """

    def __init__(self, name: str, reason: str, local: str = "") -> None:
        self.name = name
        self.reason = " ".join(reason.split())
        self.local = local
        super().__init__(f"{name}: {self.reason}" + (f"; or {local}" if local else ""))


class ChecksumMismatch(DataError):  # noqa: N818 - says what happened
    """A file whose bytes are not the pinned ones.

    Attributes
    ----------
    file : Path
        The offending file.
    expected, actual : str
        Hex sha256 that was pinned and that was found.
    """

    def __init__(self, name: str, file: Path, expected: str, actual: str, hint: str) -> None:
        self.name = name
        self.file = file
        self.expected = expected
        self.actual = actual
        super().__init__(f"{name}: wrong checksum of {file}: expected sha256 {expected}, found {actual}; {hint}")
