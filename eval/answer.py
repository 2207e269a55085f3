"""One sample through the engine: prompt, generation, score, counters and times as a row of ``samples.jsonl``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from eval.models import LoadedModel
from eval.records import Sample, Suite


def run_sample(engine: Any, loaded: LoadedModel, suite: Suite, sample: Sample) -> dict[str, Any]:
    """Generate and score one sample; returns its row (docs/outputs.md)."""
    started = time.perf_counter()
    ids = suite.encode(sample)
    generation = engine.generate(
        [ids],
        sample.max_new_tokens,
        stop_tokens(loaded, sample),
        min_new_tokens=sample.min_new_tokens,
    )
    tokens = generation.tokens[0]
    prediction = loaded.tokenizer.decode(tokens, skip_special_tokens=True)
    return {
        "task": sample.task,
        "index": sample.index,
        "prompt_fingerprint": sample.fingerprint,
        "bos_count": leading_bos(ids, loaded.tokenizer.bos_token_id),
        "truncated": sample.truncated,
        "prediction": prediction,
        "references": list(sample.references),
        "score": suite.score(sample, prediction),
        "prompt_tokens": len(ids),
        "new_tokens": len(tokens),
        "finite": generation.finite[0],
        "seconds": time.perf_counter() - started,
        "timing": {
            "prefill_s": generation.prefill_seconds,
            "ttft_s": generation.ttft_seconds,
            "decode_s": generation.decode_seconds,
            "timed_tokens": generation.timed_tokens,
            "probe_s": generation.probe_seconds,
        },
        "extra": dict(sample.extra),
        "ledger": generation.ledger.totals(),
    }


def stop_tokens(loaded: LoadedModel, sample: Sample) -> list[int]:
    """Ids that end a generation: the model's own, and the last token of each stop string of the sample."""
    ids = set(loaded.eos_token_ids)
    for text in sample.stop_strings:
        ids.add(loaded.tokenizer.encode(text, add_special_tokens=False)[-1])
    return sorted(ids)


def leading_bos(ids: Sequence[int], bos: int | None) -> int:
    """BOS tokens a prompt begins with; more than one means that template and tokenizer both added it."""
    count = 0
    while bos is not None and count < len(ids) and ids[count] == bos:
        count += 1
    return count
