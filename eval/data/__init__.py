"""External data and model files: one table of sources and one resolver with a cache."""

from eval.data.errors import ChecksumMismatch, DataError, SourceUnavailable, UnknownSource
from eval.data.resolver import at_hand, is_pinned, resolve
from eval.data.sources import SOURCES, Source
from eval.data.store import cache_root

__all__ = [
    "SOURCES",
    "ChecksumMismatch",
    "DataError",
    "Source",
    "SourceUnavailable",
    "UnknownSource",
    "at_hand",
    "cache_root",
    "is_pinned",
    "resolve",
]
