"""Where a model's files are and which bytes they hold: named, local folder, GGUF file, or hub."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from eval import gguf
from eval.data import DataError, hub, resolve

NAMED_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "smollm2_135m": "model/smollm2_135m",
        "qwen25_coder_0_5b": "model/qwen25_coder_0_5b",
        "llama31_8b": "hub:meta-llama/Llama-3.1-8B-Instruct",
        "qwen25_7b": "hub:Qwen/Qwen2.5-7B-Instruct",
        "qwen3_8b": "hub:Qwen/Qwen3-8B",
        "mistral_7b": "hub:mistralai/Mistral-7B-Instruct-v0.3",
    }
)
"""Models known by name: a source of `eval.data`, or ``hub:`` and a repository."""

WHOLE_FILE_LIMIT = 64 << 20
SAMPLES = 256
SAMPLE_BYTES = 4096


class ModelError(Exception):
    """A model that cannot be used as asked; the text is one line with the field and the value."""


@dataclass(frozen=True)
class ModelFiles:
    """A model folder that transformers can open."""

    label: str
    """What error messages call the model: the key and value that chose it."""
    location: str
    """Local folder or hub repository."""
    hub_revision: str | None
    """Revision asked of the hub; None for a local folder."""
    identity: str | None
    """Content identity of a local model; None for the hub, whose commit is known once it answered."""


def data_source(name: str, path: str | None) -> str | None:
    """Source of `eval.data` that holds a model; None for a local one, and for one of the hub."""
    origin = NAMED_MODELS.get(name) if path is None else None
    return None if origin is None or origin.startswith("hub:") else origin


def locate(name: str, path: str | None, revision: str | None) -> ModelFiles:
    """Find a model's files, fetching and converting what is needed.

    Parameters
    ----------
    name : str
        Key of `NAMED_MODELS`; only a label where `path` is given.
    path : str or None
        Local Hugging Face folder or GGUF file.
    revision : str or None
        Hub branch, tag or commit; None for the default branch.

    Raises
    ------
    ModelError
        Unknown name, missing or damaged files, gated model without access, or no network.
    """
    label = f"model={name}" if path is None else f"model.path={path}"
    try:
        if path is not None:
            return _local(label, Path(path).expanduser())
        if name not in NAMED_MODELS:
            raise ModelError(
                f"model={name} is unknown; accepted: {', '.join(NAMED_MODELS)}, "
                "or model.path= with a Hugging Face folder or a GGUF file"
            )
        origin = NAMED_MODELS[name]
        if origin.startswith("hub:"):
            repo = origin.removeprefix("hub:")
            hub.require(repo, "config.json", revision=revision)
            return ModelFiles(label, repo, revision, None)
        return _converted(label, resolve(origin))
    except hub.HubRefusal as refusal:
        raise ModelError(f"{label}: {refusal}; or give a local copy with model.path=") from None
    except (DataError, gguf.GGUFError) as error:
        raise ModelError(f"{label}: {error}") from None


def _local(label: str, path: Path) -> ModelFiles:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"model.path={path} has no config.json; give a Hugging Face model folder, or a GGUF file itself"
            )
        return ModelFiles(label, str(path), None, folder_identity(path))
    if not path.is_file():
        raise ModelError(f"model.path={path} does not exist; give a Hugging Face model folder or a GGUF file")
    return _converted(label, path)


def _converted(label: str, path: Path) -> ModelFiles:
    folder, digest = gguf.converted(path)
    return ModelFiles(label, str(folder), None, f"gguf-{digest}-v{gguf.FORMAT}")


def folder_identity(folder: Path) -> str:
    """Identity of a model folder by content: ``folder-`` and 32 hex digits.

    Configuration and tokenizer files are hashed whole. Of weight files above 64 MiB, the size, the
    first megabyte (which holds safetensors' header) and 256 evenly spaced blocks of 4 KiB are
    hashed: training changes nearly every block, and reading a whole model would take minutes. An
    edit of a few single weights between the blocks is not seen.

    Raises
    ------
    ModelError
        If the folder holds no weights or a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        files = sorted(f for f in folder.iterdir() if f.is_file() and f.suffix in _IDENTIFYING_SUFFIXES)
        if not any(f.suffix in (".safetensors", ".bin") for f in files):
            raise ModelError(f"model.path={folder} has no weights (*.safetensors); give a complete model folder")
        for file in files:
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            _update(digest, file)
    except OSError as error:
        raise ModelError(f"model.path={folder} cannot be read ({error.strerror or error})") from None
    return f"folder-{digest.hexdigest()[:32]}"


_IDENTIFYING_SUFFIXES = frozenset({".safetensors", ".bin", ".json", ".model", ".jinja", ".txt"})


def _update(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE_FILE_LIMIT:
            digest.update(stream.read())
            return
        digest.update(stream.read(1 << 20))
        for index in range(SAMPLES):
            stream.seek((size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
