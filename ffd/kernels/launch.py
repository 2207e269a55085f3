"""Launch heuristics and scratch memory: every choice that depends on the GPU, in one place.

There is no autotuner: a captured graph must never meet a configuration it has not compiled, and the
same call must take the same path on every run. Numbers were chosen on an H200 (docs/kernels.md) and
are scaled to other GPUs by their count of multiprocessors and shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.ledger import Ledger

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Kernels run in Triton's interpreter, on the CPU: no inline assembly, no bf16 arithmetic, a small grid."""


SCAN_WARPS = 18
"""Scan programs, of one warp each, per multiprocessor."""
SCAN_STAGES = 2
"""Pipeline stages of a scan program."""
SCAN_TILE = 64
"""Tokens a scan program unpacks at once; more would need registers that other warps can use better."""
SCAN_REGISTERS = 104
"""Registers per thread of a scan program, which decide how many fit a multiprocessor."""
APPEND_PROGRAMS = 64
"""Appending programs, of one warp each, in the scan's launch; at least one for each kv head."""
SHARED_UNITS = 6144
"""Sub-blocks of all kv heads beyond which their kept tiles are listed by a launch of its own and shared out evenly:
2.5 us, less than what heads that keep unequal shares cost then."""
KEEP_WARPS = 8
"""Warps per program of that launch."""
KIVI_PROGRAMS = {2: (12, 168), 4: (8, 255)}
"""KIVI's programs, of one warp each, per multiprocessor, and the registers of their threads, by bits of a code: what
the loop needs with next to no spill, and as many programs as that leaves room for."""
ATTEND_PROGRAMS = 2
"""Attending programs per multiprocessor."""
ATTEND_WARPS = 4
"""Warps per attending program."""
ATTEND_TILE = 64
"""Tokens per step of an attending program, at most a sub-block."""
ATTEND_BUFFERS = 3
"""Kept tiles in flight per attending program; enough shared memory that no third program fits a multiprocessor,
which would leave others idle when a dependent launch fills up early."""


@dataclass(frozen=True)
class Hardware:
    """What the heuristics ask about a device."""

    multiprocessors: int
    shared_memory: int
    """Bytes a program may use."""
    ptx: bool
    """Inline PTX is available."""
    subnormals: bool
    """Tensor cores keep fp16 subnormals (AMD's second generation flushes them)."""
    dependent_launch: bool
    """Programs may be set up while the previous launch still runs (Hopper and later)."""

    @property
    def launch_options(self) -> dict[str, bool]:
        """For kernels that begin with `common.follow_previous_launch`, beside its ``PDL`` argument."""
        return {"launch_pdl": True} if self.dependent_launch else {}


@cache
def hardware(device: torch.device) -> Hardware:
    """Properties of a device; the interpreter stands for a GPU of two multiprocessors."""
    if INTERPRETED:
        return Hardware(multiprocessors=2, shared_memory=1 << 20, ptx=False, subnormals=True, dependent_launch=False)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 64 << 10)
    nvidia = torch.version.hip is None
    dependent = nvidia and properties.major >= 9
    return Hardware(properties.multi_processor_count, shared, nvidia, nvidia, dependent)


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """Operand type of tensor-core products on model-dtype data."""
    if dtype == torch.float16:
        return tl.float16
    return tl.bfloat16 if dtype == torch.bfloat16 and not INTERPRETED else tl.float32


def padded(size: int, least: int) -> int:
    """Next power of two, at least ``least``: Triton's tiles are powers of two."""
    return max(least, triton.next_power_of_2(size))


def fit_tile(tokens: int, bytes_per_token: int, shared_memory: int, stages: int) -> tuple[int, int]:
    """Shrink a tile, then its pipeline, until ``stages`` tiles fit into shared memory.

    Returns
    -------
    tuple[int, int]
        Tokens per tile (at least 16, a tensor-core operand) and pipeline stages.
    """
    budget = shared_memory - (8 << 10)  # left for reductions and layout changes
    while tokens > 16 and tokens * bytes_per_token * 2 > budget:
        tokens //= 2
    while stages > 1 and tokens * bytes_per_token * stages > budget:
        stages -= 1
    return tokens, stages


def reduced_channels(heads: int, head_dim: int, multiprocessors: int) -> int:
    """Channels that a reducing program takes of its head, a power of two.

    Few heads leave multiprocessors idle: then a head's channels are shared out, for shorter programs.
    """
    width = padded(head_dim, 16)
    while width > 32 and heads * triton.cdiv(head_dim, width) < multiprocessors:
        width //= 2
    return width


def unit_chunk(units: int, group: int) -> int:
    """Sub-blocks tested at once: 64 registers a thread of four warps, which is 256K tokens in one go for G = 4."""
    return min(padded(units, 1), 8192 // padded(group, 1))


S = TypeVar("S")
_SCRATCH: WeakKeyDictionary[Ledger, object] = WeakKeyDictionary()


def scratch_of(ledger: Ledger, allocate: Callable[[], S]) -> S:
    """Scratch memory of a layer: allocated at its first step, at one address until the layer is freed.

    Captured graphs hold raw addresses, so scratch is neither pooled nor reallocated. The ledger is the
    key because every decode kernel is given one and it lives as long as its layer.
    """
    found = _SCRATCH.get(ledger)
    if found is None:
        found = _SCRATCH[ledger] = allocate()
    return found  # type: ignore[return-value]


@dataclass(frozen=True)
class Partials:
    """Split-K results of one step, float32."""

    row_max: Tensor
    """[B * Hkv, splits, G]"""
    row_sum: Tensor
    """[B * Hkv, splits, G]"""
    acc: Tensor
    """[B * Hkv, splits, G, d]"""

    @classmethod
    def allocate(cls, row_heads: int, splits: int, group: int, head_dim: int, device: torch.device) -> Partials:
        """Uninitialised."""
        stats = (row_heads, splits, group)
        return cls(
            row_max=torch.empty(stats, dtype=torch.float32, device=device),
            row_sum=torch.empty(stats, dtype=torch.float32, device=device),
            acc=torch.empty(*stats, head_dim, dtype=torch.float32, device=device),
        )
