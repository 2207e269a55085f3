"""Sparse decoding behind plain ``model.generate``."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ffd.attention import register
from ffd.cache import SparseCache, UnsupportedModelError
from ffd.engine import cache_keyword
from ffd.methods import Method
from ffd.report import LedgerReport, read_ledger


class Attachment:
    """A model whose ``generate`` decodes by a method, until `detach` (or the end of a ``with`` block)."""

    def __init__(self, model: Any, method: Method, executor: str = "auto") -> None:
        self.model = model
        self.method = method
        self.executor = executor
        self.cache: SparseCache | None = None
        self._previous = model.config._attn_implementation
        self._generate = model.generate
        self._had_own_generate = "generate" in vars(model)
        model.set_attn_implementation(register())
        model.generate = self.generate

    def generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """Run ``model.generate`` with a fresh sparse cache; takes the same arguments.

        Raises
        ------
        UnsupportedModelError
            For beam search, assisted decoding, a cache of the caller's, or embeddings as input.
        """
        input_ids = inputs if inputs is not None else kwargs.pop("input_ids", None)
        if input_ids is None:
            raise UnsupportedModelError("inputs_embeds: sparse decoding needs input_ids")
        for name in ("cache", "past_key_values", "assistant_model", "cache_implementation", "prompt_lookup_num_tokens"):
            if kwargs.get(name) is not None:
                raise UnsupportedModelError(f"{name}: not supported while a sparse method is attached")
        # generate() would resolve these itself, but the cache has to be allocated before it starts.
        config, _ = self.model._prepare_generation_config(
            generation_config, **{k: v for k, v in kwargs.items() if k != "attention_mask"}
        )
        if (config.num_beams or 1) > 1:
            raise UnsupportedModelError(f"num_beams={config.num_beams}: beam search is not supported; use num_beams=1")
        if config.use_cache is False:
            raise UnsupportedModelError("use_cache=False: sparse decoding lives in the cache")
        width = input_ids.shape[1]
        if config.max_new_tokens is not None:
            capacity = width + config.max_new_tokens
        else:
            capacity = config.max_length or width + 20  # transformers' own default budget
        mask = kwargs.get("attention_mask")
        lengths = [width] * input_ids.shape[0] if mask is None else mask.sum(dim=1).tolist()
        repeats = config.num_return_sequences or 1
        lengths = [length for length in lengths for _ in range(repeats)]
        self.cache = SparseCache(
            self.model.config,
            self.method,
            batch_size=len(lengths),
            capacity=max(capacity, width + 1),
            dtype=self.model.dtype,
            device=self.model.device,
            executor=self.executor,
        )
        self.cache.begin(lengths, width)
        kwargs[cache_keyword(self.model)] = self.cache
        return self._generate(input_ids, generation_config=generation_config, **kwargs)

    def report(self) -> LedgerReport:
        """What the last ``generate`` read, from the device counters; raises RuntimeError before the first."""
        if self.cache is None:
            raise RuntimeError("report: generate has not been called yet")
        steps = (self.cache.seen_tokens - self.cache.prompt_tokens) * len(self.cache.prompt_lengths)
        return read_ledger(self.cache, steps)

    def detach(self) -> None:
        """Give the model back as it was."""
        if self._had_own_generate:
            self.model.generate = self._generate
        else:
            del self.model.generate
        self.model.set_attn_implementation(self._previous)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def attach(model: Any, method: Method, executor: str = "auto") -> Attachment:
    """Make ``model.generate`` decode by ``method``.

    Parameters
    ----------
    model
        A transformers causal LM in eval mode.
    method
        For example ``FFD(delta=7)``.
    executor
        ``auto`` (fused kernels on a GPU, else the fp32 reference), ``fused`` or ``reference``.

    Returns
    -------
    Attachment
        Holds the ledger of the last call and detaches the method; usable in a ``with`` statement.
    """
    return Attachment(model, method, executor)
