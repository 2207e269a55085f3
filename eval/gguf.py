"""Convert a GGUF file once into a safetensors folder that transformers loads in a fraction of a second.

What the file says about its tokenizer is carried over by the rules of the format's reference
implementation (llama.cpp, src/llama-vocab.cpp), which transformers applies only in part and
differently from version to version: how text is split before merging, whether a start token is
added, and which tokens end a generation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.data import store
from eval.data.hub import quiet

FORMAT = 1
"""Version of the conversion; part of the folder's key, so a change here converts anew."""
FLOAT32_LIMIT = 1_000_000_000
"""Models with fewer parameters are stored in float32, which keeps the dequantised weights exactly
and maps from disk without a copy. Larger ones are stored in float16: half the disk, and its rounding
(2^-11) is far below the quantisation step of the file."""


class GGUFError(Exception):
    """A file that is not a readable GGUF model; the text is one line."""


@dataclass(frozen=True)
class PreTokenizer:
    """What the name in ``tokenizer.ggml.pre`` stands for."""

    pattern: str | None
    """Regular expression whose matches are merged separately; None: single digits, then GPT-2's."""
    adds_bos: bool = False
    """Whether a start token is added when the file does not say."""
    ignores_merges: bool = False
    """Whether a piece that is a token as a whole is never split (Llama 3)."""
    ends: tuple[str, ...] = ()
    """Tokens that end a generation in the published generation configurations of such models."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = PreTokenizer(
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    adds_bos=True,
    ignores_merges=True,
    ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
)
PRE_TOKENIZERS = {
    "smollm": PreTokenizer(None),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": PreTokenizer(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", ends=("<|im_end|>", "<|endoftext|>")),
}
"""Byte-level BPE pre-tokenizers of the model families the project supports."""


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
        return _convert_once(path, digest, folder), digest


def _convert_once(path: Path, digest: str, folder: Path) -> Path:
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
    return folder


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
            # A slice of a memory map calls back into Python, millions of times for a vocabulary; one of a view does not.
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
            tokenizer = _rebuild_tokenizer(AutoTokenizer.from_pretrained(path.parent, **options), metadata)
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
        model.generation_config = _generation_config(tokenizer, metadata)
        if model.num_parameters() > FLOAT32_LIMIT:
            model.to(torch.float16)
        model.save_pretrained(target)
        tokenizer.model_max_length = loaded.config.max_position_embeddings
        tokenizer.save_pretrained(target)


def _rule(metadata: dict[str, Any]) -> PreTokenizer | None:
    return PRE_TOKENIZERS.get(metadata.get("tokenizer.ggml.pre", ""))


def _rebuild_tokenizer(tokenizer: Any, metadata: dict[str, Any]) -> Any:
    """A generic fast tokenizer with the file's vocabulary and the reference implementation's rules."""
    from tokenizers import Regex, processors
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
    from transformers import PreTrainedTokenizerFast

    backend = tokenizer.backend_tokenizer
    rule = _rule(metadata)
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    if rule is not None:
        if rule.pattern is None:
            steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        else:
            split = Split(Regex(rule.pattern), behavior="isolated")
            steps = [split, ByteLevel(add_prefix_space=False, use_regex=False)]
        backend.pre_tokenizer = Sequence(steps)
        backend.model.ignore_merges = rule.ignores_merges
    elif not sentencepiece:
        name = metadata.get("tokenizer.ggml.pre")
        print(f"ffd: GGUF pre-tokenizer {name!r} is not known here; taken as transformers reads it", file=sys.stderr)
    # By the file's ids: what transformers makes of them differs between its versions.
    special = {
        f"{role}_token": backend.id_to_token(metadata[f"tokenizer.ggml.{key}_token_id"])
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    bos = special.get("bos_token")
    default = sentencepiece or (rule is not None and rule.adds_bos)
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", default):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
    else:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    rebuilt = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    rebuilt.chat_template = tokenizer.chat_template
    return rebuilt


def _generation_config(tokenizer: Any, metadata: dict[str, Any]) -> Any:
    from transformers import GenerationConfig

    ends = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    rule = _rule(metadata)
    vocabulary = tokenizer.get_vocab()
    ends |= {vocabulary.get(token) for token in (rule.ends if rule is not None else ())}
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=sorted(end for end in ends if end is not None),
        pad_token_id=tokenizer.pad_token_id,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
