"""Prefill and greedy decoding of one model under one method.

The cache is allocated once and begun anew for every batch of prompts. On a GPU the whole decode step,
the choice of the next token included, is one CUDA graph that serves all lengths and all samples:
lengths, positions and stop flags live on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ffd.attention import register
from ffd.cache import Probe, SparseCache, cache_keyword
from ffd.fusion import resolve_fusion
from ffd.generation import Generation
from ffd.graph import CapturedStep, resolve_graph
from ffd.greedy import GreedyState
from ffd.methods import Method
from ffd.paired_cache import PairedCache
from ffd.prompts import in_chunks, left_padded, require_room
from ffd.report import read_ledger
from ffd.support import require_one_device

STEPS_PER_STOP_CHECK = 8  # the host looks at the stop flags this often; finished rows do not count in the ledger

Progress = Callable[[int], None]
"""Called while decoding with the number of tokens generated so far per row."""


class Engine:
    """Runs a transformers causal LM with a sparse decode method.

    Parameters
    ----------
    model
        A causal LM in eval mode (Llama, Qwen2, Qwen3, Mistral families); its attention implementation
        is set to ours.
    method
        Decode method.
    capacity
        Tokens a row can hold, prompt and generated together.
    batch_size
        Rows decoded together.
    executor
        ``auto``, ``fused`` or ``reference``.
    graph
        ``auto`` captures wherever it can; True raises where it cannot; False never captures.
    fuse
        Run the decode step's norms, projections, MLPs, rotary embedding and choice of the token through fused
        kernels: ``auto`` on a GPU wherever modules are recognised; True raises where any is not; False never.
        It serves every method alike. Prefill and all other use of the model keep its own modules.
    prefill_chunk
        Largest number of prompt tokens per forward; None for whole prompts.
    probe, probe_every
        Called after every layer's attention at decode steps 0, ``probe_every``, ...; those steps run
        eagerly and exact keys are kept for them.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be run this way.
    """

    def __init__(
        self,
        model: Any,
        method: Method,
        *,
        capacity: int,
        batch_size: int = 1,
        executor: str = "auto",
        graph: bool | str = "auto",
        fuse: bool | str = "auto",
        prefill_chunk: int | None = None,
        probe: Probe | None = None,
        probe_every: int = 16,
    ) -> None:
        for name, value in (("capacity", capacity), ("batch_size", batch_size), ("probe_every", probe_every)):
            if value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")
        if prefill_chunk is not None and prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk}: expected at least 1, or None")
        self.device = require_one_device(model)
        self.model = model
        self.method = method
        self.rows = batch_size
        self.prefill_chunk = prefill_chunk
        self.probe = probe
        self.probe_every = probe_every
        model.set_attn_implementation(register())
        self.cache = SparseCache(
            model.config,
            method,
            batch_size=batch_size,
            capacity=capacity,
            dtype=model.dtype,
            device=self.device,
            executor=executor,
            shadow=probe is not None,
        )
        self._cache_keyword = cache_keyword(model)
        text = model.config.get_text_config(decoder=True)
        self.eager_reason = resolve_graph(graph, text, self.cache.sliding_layers, self.device)
        """Why decode steps are not captured in a graph, or None where they are."""
        self._fusion = resolve_fusion(fuse, model, batch_size)
        self.fused: tuple[str, ...] = tuple(self._fusion.fused)
        """What decode steps run through fused kernels."""
        self.unfused: dict[str, str] = dict(self._fusion.refused)
        """What kept the model's own modules, and why."""
        self._state = GreedyState(batch_size, capacity, self.device, fused=bool(self.fused))
        self._captured: CapturedStep | None = None
        self._probe_seconds = 0.0
        self._probed_steps = 0

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_tokens: Sequence[int] = (),
        *,
        min_new_tokens: int = 0,
        progress: Progress | None = None,
    ) -> Generation:
        """Decode greedily.

        Parameters
        ----------
        prompts
            Token ids of each row, without padding; as many rows as the engine's batch size.
        max_new_tokens
            Tokens to generate at most, the stop token included.
        stop_tokens
            Ids that end a row.
        min_new_tokens
            Stop tokens cannot be chosen before this many tokens were generated.
        progress
            Called with the number of tokens generated so far.

        Returns
        -------
        Generation

        Raises
        ------
        ValueError
            If a prompt is empty or prompt and new tokens exceed the capacity.
        """
        lengths = [len(p) for p in prompts]
        require_room(lengths, max_new_tokens, rows=self.rows, capacity=self.cache.capacity)
        self._prepare_capture()
        started = self._now()
        self._begin(lengths, stop_tokens, min_new_tokens)
        logits, mask = self._prefill(prompts, lengths)
        prefilled = self._now()
        self._choose(logits)
        running = bool(self.cache.rows.active.any())
        first = self._now()
        self._probe_seconds, self._probed_steps = 0.0, 0
        steps = self._decode(max_new_tokens - 1, mask, progress) if running else 0
        finished = self._now()
        tokens, finite = self._state.collect(steps + 1, set(stop_tokens))
        return Generation(
            tokens=tokens,
            finite=finite,
            prefill_seconds=prefilled - started,
            ttft_seconds=first - started,
            decode_seconds=finished - first - self._probe_seconds,
            timed_tokens=(steps - self._probed_steps) * len(prompts),
            probe_seconds=self._probe_seconds,
            decode_steps=sum(len(row) - 1 for row in tokens),
            ledger=read_ledger(self.cache, sum(len(row) - 1 for row in tokens)),
        )

    def _begin(self, lengths: list[int], stop_tokens: Sequence[int], min_new_tokens: int) -> None:
        self.cache.begin(lengths)
        self.cache.probe = None
        self._state.begin(lengths, stop_tokens, min_new_tokens)

    def _prefill(self, prompts: Sequence[Sequence[int]], lengths: list[int]) -> tuple[Tensor, Tensor | None]:
        """Forward the prompts in chunks; returns the last logits [B, vocab] and the padding mask, if any."""
        batch = left_padded(prompts, self.device)
        for ids, positions, padding in in_chunks(*batch, self.prefill_chunk or max(lengths)):
            logits = self._forward(ids, positions, padding)
        return logits, padding

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: PairedCache | None = None) -> Tensor:
        out = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_keyword: self.cache if cache is None else cache},
        )
        return out.logits[:, -1]

    def _choose(self, logits: Tensor) -> None:
        """Take the likeliest token of each row and advance the device state."""
        self._state.choose(logits, self.cache.rows.active)

    def _step(self, mask: Tensor | None = None) -> None:
        with self._fusion.active():
            logits = self._forward(self._state.token, self._state.position, mask)
        self._choose(logits)

    def _decode(self, max_steps: int, padding: Tensor | None, progress: Progress | None) -> int:
        """Run up to ``max_steps`` decode steps; returns how many were run."""
        # Only stock sliding-window layers look at a mask while decoding: ours know their rows' lengths.
        mask = padding if self.cache.sliding_layers else None
        for step in range(max_steps):
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
            if self.probe is not None and step % self.probe_every == 0:
                self._probed_step(mask)
            elif self._captured is not None:
                self._captured.replay()
                self.cache.note_replayed_step()
            else:
                self._step(mask)
            if (step + 1) % STEPS_PER_STOP_CHECK == 0 or self.device.type == "cpu":
                if progress is not None:
                    progress(step + 2)
                if not bool(self.cache.rows.active.any()):
                    return step + 1
        return max_steps

    def _probed_step(self, mask: Tensor | None) -> None:
        """Run one step eagerly with the probe, timed apart from the others."""
        started = self._now()
        self.cache.probe = self.probe
        self._step(mask)
        self.cache.probe = None
        self._probe_seconds += self._now() - started
        self._probed_steps += 1

    def _prepare_capture(self) -> None:
        """Capture the decode step once, on a disposable one-token prompt."""
        if self._captured is not None or self.eager_reason is not None:
            return
        rows = self.rows
        self._begin([1] * rows, (), 0)
        self._prefill([[0]] * rows, [1] * rows)
        self._captured = CapturedStep(self._step)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
