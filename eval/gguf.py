"""Convert a GGUF file once into a safetensors folder that transformers loads in a fraction of a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eval.data import store
from eval.data.hub import quiet
from eval.gguf_tokenizer import generation_config, rebuild_tokenizer

FORMAT = 1
"""Version of the conversion; part of the folder's key, so a change here converts anew."""
FLOAT32_LIMIT = 1_000_000_000
"""Models with fewer parameters are stored in float32, which keeps the dequantised weights exactly
and maps from disk without a copy. Larger ones are stored in float16: half the disk, and its rounding
(2^-11) is far below the quantisation step of the file."""


class GGUFError(Exception):
    """A file that is not a readable GGUF model; the text is one line."""


def converted(path: Path) -> tuple[Path, str]:
    """Folder with the model and tokenizer of a GGUF file, converted first if that was never done.

    Parameters
    ----------
    path : Path
        A GGUF file of an architecture that transformers reads.

    Returns
    -------
    folder : Path
        A Hugging Face model folder in the cache (config, generation config, weights, tokenizer).
    sha256 : str
        Hex checksum of the GGUF file: the model's identity.

    Raises
    ------
    GGUFError
        If the file is damaged, of an unsupported architecture, or the cache cannot be written.
    """
    digest = store.remembered_sha256(path)
    folder = store.cache_root() / "converted" / f"{digest[:16]}-v{FORMAT}"
    if folder.is_dir():
        return folder, digest
    with _one_reader():
        _convert_once(path, digest, folder)
    return folder, digest


def _convert_once(path: Path, digest: str, folder: Path) -> None:
    metadata = read_metadata(path)
    from safetensors import SafetensorError

    try:
        with store.exclusive(f"convert-{digest[:16]}", timeout=3600) as staging:
            if not folder.is_dir():  # another process may have converted it meanwhile
                print(f"ffd: converting {path.name} to safetensors, once", file=sys.stderr, flush=True)
                _convert(path, metadata, staging / "model")
                store.install(staging / "model", folder)
    except TimeoutError as error:
        raise GGUFError(str(error)) from None
    except (OSError, SafetensorError) as error:
        raise GGUFError(
            f"cannot convert {path.name} into {store.cache_root()} ({_first_line(error)}); "
            "make room there or set FFD_CACHE"
        ) from None


@contextmanager
def _one_reader() -> Iterator[None]:
    """A file is parsed once, however often the library and transformers open it; a large vocabulary costs seconds."""
    import gguf
    import numpy

    original = gguf.GGUFReader
    opened: dict[str, Any] = {}

    class Reader(original):  # type: ignore[misc,valid-type]
        data: Any

        def _get(self, *arguments: Any, **options: Any) -> Any:
            # A slice of a memory map calls back into Python, millions of times for a vocabulary; a view's does not.
            if type(self.data) is not numpy.ndarray:
                self.data = numpy.asarray(self.data)
            return super()._get(*arguments, **options)

    def remembered(path: Any, *arguments: Any, **options: Any) -> Any:
        key = str(path)
        if key not in opened:
            opened[key] = Reader(path, *arguments, **options)
        return opened[key]

    gguf.GGUFReader = remembered
    try:
        yield
    finally:
        gguf.GGUFReader = original


def read_metadata(path: Path) -> dict[str, Any]:
    """Metadata of a GGUF file, by key, after a check that all its tensors lie within the file.

    Raises
    ------
    GGUFError
        If the file is not GGUF, is cut off, or otherwise unreadable.
    """
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise GGUFError(f"{path} is not a GGUF file (it starts with {magic!r}, not b'GGUF')")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        end = max((tensor.data_offset + tensor.n_bytes for tensor in reader.tensors), default=0)
        if end == 0 or end > path.stat().st_size:
            raise ValueError("tensors lie beyond the end of the file")
        return {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # the reader runs into whatever the damaged bytes say
        raise GGUFError(f"{path} is damaged or cut off ({_first_line(error)})") from None


def _convert(path: Path, metadata: dict[str, Any], target: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": path.name}
    with quiet():
        try:
            tokenizer = rebuild_tokenizer(AutoTokenizer.from_pretrained(path.parent, **options), metadata)
            if hasattr(transformers, "GgufConfig"):  # newer versions may otherwise leave the weights packed
                options["quantization_config"] = transformers.GgufConfig(dequantize=True)
            loaded = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
        except Exception as error:  # unsupported architecture or tokenizer, in transformers' many ways
            raise GGUFError(f"transformers cannot read {path} ({_first_line(error)})") from None
        if hasattr(loaded.config, "quantization_config"):
            del loaded.config.quantization_config
        # A new model of the same configuration: the loaded one remembers that it came from GGUF and
        # refuses to be saved.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(loaded.config)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = generation_config(tokenizer, metadata)
        if model.num_parameters() > FLOAT32_LIMIT:
            model.to(torch.float16)
        model.save_pretrained(target)
        tokenizer.model_max_length = loaded.config.max_position_embeddings
        tokenizer.save_pretrained(target)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
