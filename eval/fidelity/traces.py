"""Recorded queries, keys and values of chosen layers and steps; `eval.fidelity.replay` runs methods over them.

A trace is one safetensors file. ``L`` stands for a model layer, post-RoPE and left-aligned as in the
cache; a step's keys are the first ``lengths[s]`` ones, since keys only ever grow.

==================  =====================  =================================================
tensor              shape and dtype        content
==================  =====================  =================================================
``keys.L``          [B, Hkv, N, d] model   exact keys at the last recorded step
``values.L``        [B, Hkv, N, d] model   exact values; absent if they were not recorded
``queries.L``       [S, B, Hq, d] model    query of each recorded step
``lengths``         [S, B] int32           tokens visible at each step, the current one included
``active``          [S, B] bool            rows that still decoded
``prompt_lengths``  [B] int32              tokens that came by prefill, the rest by appending
==================  =====================  =================================================

The metadata's ``trace`` is JSON: ``format`` (ffd-trace/1), ``scale`` (softmax scale), ``layers``, ``note``, and
``decode_steps`` of the answer, recorded or not, where they are known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffd.cache import DecodeHandle

FORMAT = "ffd-trace/1"


@dataclass(frozen=True, eq=False)
class Trace:
    """Contents of a trace; the module's docstring gives shapes and dtypes."""

    scale: float
    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    """Empty if values were not recorded."""
    queries: dict[int, Tensor]
    lengths: Tensor
    active: Tensor
    prompt_lengths: Tensor
    note: str = ""
    """Free text: model, prompt."""
    decode_steps: int | None = None
    """Steps of the answer, recorded or not; None where nobody said."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Recorded model layers."""
        return tuple(self.keys)

    def to(self, device: torch.device | str) -> Trace:
        """The same trace on another device."""
        moved: dict[str, Any] = {
            name: {layer: tensor.to(device) for layer, tensor in getattr(self, name).items()}
            for name in ("keys", "values", "queries")
        }
        moved |= {name: getattr(self, name).to(device) for name in ("lengths", "active", "prompt_lengths")}
        return replace(self, **moved)

    def save(self, path: Path) -> None:
        """Write the file; an old one stays whole until the new one is complete."""
        from safetensors.torch import save_file

        tensors = {name: getattr(self, name) for name in ("lengths", "active", "prompt_lengths")}
        for kind in ("keys", "values", "queries"):
            tensors |= {f"{kind}.{layer}": tensor for layer, tensor in getattr(self, kind).items()}
        about = {"format": FORMAT, "scale": self.scale, "layers": list(self.layers), "note": self.note}
        about |= {} if self.decode_steps is None else {"decode_steps": self.decode_steps}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(tensors, partial, metadata={"trace": json.dumps(about)})
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> Trace:
        """Read a trace.

        Raises
        ------
        ValueError
            If the file is damaged or not a trace.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                about = _described((file.metadata() or {}).get("trace", "{}"))
                if about.get("format") != FORMAT:
                    raise ValueError(f"{path}: not a trace of format {FORMAT}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError as error:
            raise ValueError(f"{path}: damaged trace ({error})") from error

        def of(kind: str) -> dict[int, Tensor]:
            return {x: tensors[f"{kind}.{x}"] for x in about["layers"] if f"{kind}.{x}" in tensors}

        try:
            trace = cls(
                scale=about["scale"],
                keys=of("keys"),
                values=of("values"),
                queries=of("queries"),
                lengths=tensors["lengths"],
                active=tensors["active"],
                prompt_lengths=tensors["prompt_lengths"],
                note=about["note"],
                decode_steps=about.get("decode_steps"),
            )
        except KeyError as error:
            raise ValueError(f"{path}: damaged trace (no {error.args[0]})") from None
        problem = _problem(trace, about["layers"])
        if problem is not None:
            raise ValueError(f"{path}: damaged trace ({problem})")
        return trace


def _problem(trace: Trace, layers: Sequence[int]) -> str | None:
    """What keeps a trace from being replayed: a part that is missing, or sizes that do not fit together."""
    named = set(layers)
    if not named or set(trace.keys) != named or set(trace.queries) != named or set(trace.values) not in (set(), named):
        return f"expected keys, queries and values or none for each of layers {list(layers)}, at least one"
    if not isinstance(trace.scale, int | float):
        return f"scale {trace.scale}"
    steps, rows = trace.lengths.shape if trace.lengths.ndim == 2 else (0, 0)
    if not steps or trace.active.shape != trace.lengths.shape or trace.prompt_lengths.shape != (rows,):
        return f"lengths of shape {list(trace.lengths.shape)}"
    if any(queries.shape[:2] != (steps, rows) for queries in trace.queries.values()):
        return f"queries of other steps or rows than its lengths, {steps} by {rows}"
    held = min(keys.shape[2] for keys in trace.keys.values())
    if bool((trace.lengths <= trace.prompt_lengths).any()) or int(trace.lengths.max()) > held:
        return f"lengths to {int(trace.lengths.max())} beside prompts and {held} keys"
    return None


def _described(text: str) -> dict[str, Any]:
    """A trace's own description; empty for what is none."""
    try:
        about = json.loads(text)
    except ValueError:
        return {}
    layers = about.get("layers") if isinstance(about, dict) else None
    return about if isinstance(layers, list) and all(isinstance(layer, int) for layer in layers) else {}


class TraceRecorder:
    """A probe that records; give it to ``ffd.Engine(probe=...)`` and take the trace after ``generate``.

    Parameters
    ----------
    layers
        Model layers to record; if not given, all with full attention.
    values
        Record values too; without them a replay has no output metrics.
    """

    def __init__(self, layers: Sequence[int] | None = None, *, values: bool = True) -> None:
        self.layers = None if layers is None else tuple(sorted(set(layers)))
        self.values = values
        self.start()

    def start(self) -> None:
        """Forget what was recorded."""
        self._steps: dict[int, list[Tensor]] = {}
        self._lengths: list[Tensor] = []
        self._active: list[Tensor] = []
        self._handles: dict[int, DecodeHandle] = {}
        self._scale = 0.0

    def __call__(self, handle: DecodeHandle, q: Tensor, scale: float, out: Tensor) -> None:
        """Record one layer's query; see `ffd.cache.Probe`."""
        if self.layers is None:
            self.layers = tuple(h.layer_idx for h in handle.cache.handles)
        if handle.layer_idx not in self.layers:
            return
        if handle.layer_idx == self.layers[0]:
            self._lengths.append(handle.cache.rows.lengths.clone())
            self._active.append(handle.cache.rows.active.bool())
        self._steps.setdefault(handle.layer_idx, []).append(q.clone())
        self._handles[handle.layer_idx] = handle
        self._scale = scale

    def take(self, note: str = "", decode_steps: int | None = None) -> Trace:
        """The trace of the steps recorded since the last call, on the host; both arguments are kept with it.

        Raises
        ------
        ValueError
            If nothing was recorded, or one of the layers does not exist or is no full-attention layer.
        """
        layers = self.layers or ()
        missing = [layer for layer in layers if layer not in self._handles]
        if missing or not layers:
            raise ValueError(f"layers={list(layers)}: nothing was recorded for {missing or 'any layer'}")
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        lengths = torch.stack(self._lengths).cpu()
        n = int(lengths.max())
        for layer, handle in self._handles.items():
            if handle.shadow is None:
                raise ValueError("shadow=False: a trace needs a cache that keeps exact keys and values (shadow=True)")
            keys[layer] = handle.shadow.keys[:, :, :n].cpu().clone()
            if self.values:
                values[layer] = handle.shadow.values[:, :, :n].cpu().clone()
        trace = Trace(
            scale=self._scale,
            keys=keys,
            values=values,
            queries={layer: torch.stack(self._steps[layer]).cpu() for layer in keys},
            lengths=lengths,
            active=torch.stack(self._active).cpu(),
            prompt_lengths=torch.tensor(next(iter(self._handles.values())).cache.prompt_lengths, dtype=torch.int32),
            note=note,
            decode_steps=decode_steps,
        )
        self.start()
        return trace
