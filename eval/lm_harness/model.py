"""lm-eval's Hugging Face model with sparse decoding.

Importing this module imports lm-eval and registers the model under the name ``ffd``.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers.utils.logging import tqdm

import ffd
from eval.lm_harness.answers import Answer, Journal, measured
from eval.lm_harness.arguments import HarnessError, parse
from eval.lm_harness.clock import TokenClock
from eval.lm_harness.finite import FiniteLogits
from eval.models import LoadedModel, load_model
from ffd.cache import UnsupportedModelError
from ffd.executor import resolve_executor
from ffd.methods import Method

logger = logging.getLogger("lm_eval.ffd")

DENSE_PREFILL = "loglikelihood requests are one dense prefill each: no decode step, so the method has no part in them"


@register_model("ffd")
class SparseDecodeLM(HFLM):
    """A causal LM whose generation requests decode by a method of ours, each with a cache of its own.

    Everything else is lm-eval's: prompts, sampling options, stop strings, truncation, scoring. Requests run one at a
    time: in a batch, rows that have finished would go on decoding padding, which the counters would take for work.

    Parameters
    ----------
    pretrained
        A folder, a GGUF file, a hub name, one of our model names, or a loaded model.
    method
        Name of a method, whose knobs are then further arguments; or a method.
    executor
        ``auto`` (fused kernels on a GPU, else the fp32 reference), ``fused`` or ``reference``.
    batch_size
        1.
    max_batch_size
        Ignored: lm-eval's command line hands it to every model.
    journal
        Keeps answers as they finish.
    **arguments
        Knobs, and what `eval.lm_harness.arguments.parse` accepts.

    Raises
    ------
    HarnessError, eval.models.ModelError, ffd.executor.ExecutorError
        One line each.
    """

    def __init__(
        self,
        pretrained: str | LoadedModel,
        method: str | Method = "ffd",
        *,
        executor: str = "auto",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        journal: Journal | None = None,
        **arguments: Any,
    ) -> None:
        if str(batch_size) != "1":
            raise HarnessError(f"batch_size={batch_size}: expected 1, sparse decoding runs one request at a time")
        if isinstance(pretrained, LoadedModel) and isinstance(method, Method):
            loaded, chosen, options = pretrained, method, arguments
        elif isinstance(pretrained, str) and isinstance(method, str):
            parsed = parse({"pretrained": pretrained, "method": method, "executor": executor, **arguments})
            loaded, chosen, options = load_model(parsed.spec), parsed.method, dict(parsed.options)
        else:
            raise HarnessError("pretrained and method: expected two names, or a loaded model and a method")
        resolve_executor(executor, torch.device(loaded.device))
        # Some checkpoints come with a budget of their own, which would overrule the task's.
        loaded.model.generation_config.max_new_tokens = None
        options.setdefault("max_length", loaded.context_length)
        super().__init__(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1, **options)
        self.loaded = loaded
        self.method: Method = chosen
        self.executor = executor
        self.journal = journal
        self.answers: list[Answer] = []
        """Of the requests that this object ran, without their texts."""
        self.dense_requests = 0
        """Loglikelihood requests answered."""
        self.not_finite = 0
        """Those whose answer was NaN, as it is where logits are not finite."""
        self._truncated = False
        self._call: dict[str, Any] = {}

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse lm-eval's response cache.

        Raises
        ------
        HarnessError
            If the hook has a store: its keys hold neither model nor method.
        """
        if cache_hook.dbdict is not None:
            raise HarnessError(RESPONSE_CACHE)
        super().set_cache_hook(cache_hook)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer generation requests through the sparse decode."""
        counts: Counter[str] = Counter()
        texts = []
        for request in tqdm(requests, disable=disable_tqdm, desc=f"generate_until by {self.method.name}"):
            task = str(request.task_name)
            index, counts[task] = counts[task], counts[task] + 1
            text = None if self.journal is None else self.journal.recall(task, index)
            texts.append(self._answer(request, task, index) if text is None else text)
        found = measured(self.answers)
        sound = found["sparse_steps"] + found["dense_steps"] == found["expected_steps"] and not found["not_finite"]
        log = logger.info if sound else logger.error
        log(
            "generate_until: %(requests)d requests, %(not_finite)d with a prediction that was not finite, "
            "%(sparse_steps)d sparse + %(dense_steps)d configured-dense of "
            "%(expected_steps)d decode layer-steps, measured keep_io %(keep_io)s",
            found,
        )
        return texts

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations by dense prefill, and say so."""
        self._note_dense(len(requests))
        answers = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        self._note_broken([loglikelihood for loglikelihood, _ in answers])
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts by dense prefill, and say so."""
        self._note_dense(len(requests))
        answers = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        self._note_broken(answers)
        return answers

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode like lm-eval, remembering whether a prompt had to be cut: token ids and mask, both [B, T]."""
        ids, mask = super().tok_batch_encode(strings, padding_side=padding_side, truncation=truncation)
        self._truncated = False
        if left_truncate_len is not None and ids.shape[1] > left_truncate_len:
            self._truncated = True
            logger.warning("prompt of %d tokens cut to its last %d", ids.shape[1], left_truncate_len)
            ids, mask = ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]
        return ids, mask

    def get_model_info(self) -> dict[str, Any]:
        """Lm-eval's description of the model, with the method and what its decode steps read."""
        return {
            **super().get_model_info(),
            "model_revision": self.loaded.revision,
            "sparse_decode": {
                "method": self.method.name,
                "knobs": self.method.knobs(),
                "generate_until": measured(self.answers),
                "loglikelihood": {
                    "requests": self.dense_requests,
                    "not_finite": self.not_finite,
                    "path": DENSE_PREFILL,
                },
            },
        }

    def _answer(self, request: Any, task: str, index: int) -> str:
        started = time.perf_counter()
        self._check_budget(request.args[1], task)
        (text,) = super().generate_until([request], disable_tqdm=True)
        answer = Answer(
            task=task,
            index=index,
            document=int(request.doc_id),
            text=text,
            prompt_fingerprint=hashlib.sha256(request.args[0].encode()).hexdigest(),
            truncated=self._truncated,
            seconds=time.perf_counter() - started,
            **self._call,
        )
        self.answers.append(replace(answer, text=""))
        if self.journal is not None:
            self.journal.record(answer)
        return str(text)

    def _check_budget(self, gen_kwargs: Mapping[str, Any], task: str) -> None:
        budget = gen_kwargs.get("max_gen_toks", self.max_gen_toks)
        if isinstance(budget, int) and budget >= self.max_length:
            raise HarnessError(
                f"max_gen_toks={budget} of task {task}: expected less than the model's {self.max_length} tokens"
            )

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        if (kwargs.get("num_beams") or 1) > 1:  # generate would first complain of our streamer
            raise UnsupportedModelError(f"num_beams={kwargs['num_beams']}: sparse decoding has no beam search")
        clock = TokenClock()
        # Attached for this call alone, so that no state outlives a request and loglikelihood stays the stock model's.
        with ffd.attach(self.model, self.method, self.executor) as attached, FiniteLogits(self.model) as predictions:
            out: torch.Tensor = super()._model_generate(context, max_length, stop, streamer=clock, **kwargs)
            report = attached.report()
        prompt = context[0].tolist()
        self._call = {
            "bos_count": _leading(prompt, self.tokenizer.bos_token_id),
            "prompt_tokens": len(prompt),
            "new_tokens": out.shape[1] - len(prompt),
            "finite": predictions.all_finite,
            "ttft_seconds": clock.ttft_seconds,
            "decode_seconds": clock.decode_seconds,
            "ledger": report.totals(),
        }
        return out

    def _note_dense(self, requests: int) -> None:
        self.dense_requests += requests
        logger.warning("%s (method %s, %d requests)", DENSE_PREFILL, self.method.name, requests)

    def _note_broken(self, loglikelihoods: Sequence[float]) -> None:
        broken = sum(map(math.isnan, loglikelihoods))
        self.not_finite += broken
        if broken:
            logger.error("%d of %d loglikelihoods are not finite", broken, len(loglikelihoods))


RESPONSE_CACHE = (
    "use_cache: lm-eval's response cache knows neither model nor method and could return another method's answers; "
    "expected none (python run.py task=lm_eval keeps finished answers under the run's identity and resumes)"
)


def chat_renderer(tokenizer: Any) -> Callable[..., str]:
    """Lm-eval's rendering of a conversation, from the tokenizer alone: prompts are built before weights are loaded."""
    return partial(HFLM.apply_chat_template, SimpleNamespace(tokenizer=tokenizer, chat_template_args={}))


def _leading(tokens: Sequence[int], bos: int | None) -> int:
    count = 0
    while bos is not None and count < len(tokens) and tokens[count] == bos:
        count += 1
    return count
