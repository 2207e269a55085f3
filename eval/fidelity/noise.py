"""How often the scan's error exceeds a margin, and what the paper's sub-Gaussian argument allows.

The paper models the quantisation noise of a key's channels as independent, mean-zero and sub-Gaussian.
A score's error is then a weighted sum of them, ``e = scale * sum_c q_c * noise_c``, and

``P(|e| > t) <= 2 exp(-t^2 / (2 s^2))``  with  ``s^2 = scale^2 * sum_c q_c^2 * v_c``.

Two variance proxies ``v_c``: the mean square of the channel's noise in its block (a Gaussian's), and the
square of its half step, which bounds the noise (Hoeffding; holds for any such noise). A margin in
proportion to the number of channels makes the bound fall exponentially with the head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.fidelity.traces import Trace
from ffd.quantization import Levels, odd_levels, quantize_blocks

_BOUNDS = ("bound_measured", "bound_range")


@dataclass
class Exceedance:
    """Sums over steps, heads and tokens of complete blocks; one entry per margin or number of channels."""

    size: int
    tokens: int = 0
    """Scores compared."""
    first_tokens: int = 0
    """Of these, scores of the first token, the usual attention sink."""
    observed: Tensor = field(init=False)
    """float64: scores whose error exceeds the margin."""
    observed_first: Tensor = field(init=False)
    """float64: the same of first tokens."""
    bound_measured: Tensor = field(init=False)
    """float64: sum of the bounds from measured noise."""
    bound_range: Tensor = field(init=False)
    """float64: sum of the bounds from the noise's range."""

    def __post_init__(self) -> None:
        for name in ("observed", "observed_first", *_BOUNDS):
            setattr(self, name, torch.zeros(self.size, dtype=torch.float64))

    def add(self, index: int, error: Tensor, margin: float, proxies: Sequence[Tensor]) -> None:
        """Add one layer's step to an entry.

        Parameters
        ----------
        index
            Which margin or number of channels.
        error
            [Hq, N], nats.
        margin
            Nats.
        proxies
            Squared scales ``s^2`` by measured noise and by range, each [Hq, blocks].
        """
        beyond = error.abs() > margin
        self.observed[index] += float(beyond.sum())
        self.observed_first[index] += float(beyond[:, 0].sum())
        per_block = error.shape[1] // proxies[0].shape[1]
        for name, squared in zip(_BOUNDS, proxies, strict=True):
            # A head whose query or noise is zero errs by nothing.
            bound = (2 * torch.exp(-(margin**2) / (2 * squared.double().clamp(min=1e-300)))).clamp(max=1.0)
            getattr(self, name)[index] += float(bound.sum()) * per_block

    def shares(self, index: int) -> dict[str, float]:
        """Observed and bounded probabilities of an entry."""
        others = self.tokens - self.first_tokens
        return {
            "observed": float(self.observed[index]) / self.tokens,
            "observed_first_token": float(self.observed_first[index]) / self.first_tokens,
            "observed_other_tokens": float(self.observed[index] - self.observed_first[index]) / others,
            "bound_measured": float(self.bound_measured[index]) / self.tokens,
            "bound_range": float(self.bound_range[index]) / self.tokens,
        }


@dataclass(frozen=True)
class ScanNoise:
    """Noise of one kv head's complete blocks, and the queries that meet it."""

    queries: Tensor
    """float32 [G, d], times the softmax scale."""
    noise: Tensor
    """float32 [N, d]: key less its 2-bit copy."""
    mean_square: Tensor
    """float32 [blocks, d]: of the noise in each block."""
    half_step_square: Tensor
    """float32 [blocks, d]."""

    def error(self, channels: Tensor) -> Tensor:
        """Score errors from some channels alone: [G, N], nats."""
        return self.queries[:, channels] @ self.noise[:, channels].T

    def proxies(self, channels: Tensor) -> tuple[Tensor, Tensor]:
        """Squared scales of the bound from some channels alone, by measured noise and by range; each [G, blocks]."""
        weights = self.queries[:, channels].square()
        return weights @ self.mean_square[:, channels].T, weights @ self.half_step_square[:, channels].T


def scan_noise(trace: Trace, *, block_size: int, levels: Levels, centre: bool) -> Iterator[ScanNoise]:
    """The noise met by every recorded query, step by step, layer by layer, row by row and kv head by kv head."""
    for layer in trace.layers:
        keys, queries = trace.keys[layer].float(), trace.queries[layer].float() * trace.scale
        hkv = keys.shape[1]
        for step, lengths in enumerate(trace.lengths.tolist()):
            for row, length in enumerate(lengths):
                whole = (length - 1) // block_size * block_size  # what a step at this length scans
                if not whole or not bool(trace.active[step, row]):
                    continue
                own = keys[row, :, :whole]
                if centre:
                    own = own - keys[row, :, : int(trace.prompt_lengths[row])].mean(dim=1, keepdim=True)
                stored = quantize_blocks(own.unflatten(1, (-1, block_size)), levels, "none")
                half = stored.half_step.float()
                noise = own.unflatten(1, (-1, block_size)) - odd_levels(stored.codes) * half.unsqueeze(-2)
                grouped = queries[step, row].unflatten(0, (hkv, -1))
                for head in range(hkv):
                    yield ScanNoise(
                        grouped[head], noise[head].flatten(0, 1), noise[head].square().mean(dim=1), half[head].square()
                    )


def exceedance_by_margin(found: Iterator[ScanNoise], margins: Sequence[float]) -> list[dict[str, float]]:
    """Observed and bounded probability that a score's error exceeds each margin, nats."""
    total = Exceedance(len(margins))
    for scan in found:
        channels = torch.arange(scan.noise.shape[1])
        error, proxies = scan.error(channels), scan.proxies(channels)
        total.tokens += error.numel()
        total.first_tokens += error.shape[0]
        for index, margin in enumerate(margins):
            total.add(index, error, margin, proxies)
    return [{"margin_nats": margin, **total.shares(i)} for i, margin in enumerate(margins)]


def exceedance_by_channels(
    found: Iterator[ScanNoise], counts: Sequence[int], margin: float, seed: int = 0
) -> list[dict[str, float]]:
    """Observed and bounded probability with part of the channels and a margin in proportion to their number.

    Parameters
    ----------
    found
        From `scan_noise`.
    counts
        Numbers of channels, at most the head dimension; chosen at random for each step and kv head.
    margin
        With all channels, nats; ``margin * m / d`` with ``m`` of them.
    seed
        Of the choice.
    """
    generator = torch.Generator().manual_seed(seed)
    total = Exceedance(len(counts))
    margins = [0.0] * len(counts)
    for scan in found:
        d = scan.noise.shape[1]
        order = torch.randperm(d, generator=generator)
        total.tokens += scan.queries.shape[0] * scan.noise.shape[0]
        total.first_tokens += scan.queries.shape[0]
        for index, count in enumerate(counts):
            margins[index] = margin * count / d
            channels = order[:count]
            total.add(index, scan.error(channels), margins[index], scan.proxies(channels))
    return [{"channels": m, "margin_nats": margins[i], **total.shares(i)} for i, m in enumerate(counts)]
