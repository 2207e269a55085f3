"""FFD decode: append, scan, selection and attention of one token, for all lengths up to capacity.

Three launches: `ffd_scan` stores the token and scores the 2-bit thumbnails, `ffd_attend` tests their maxima against
``pseudo_max - delta`` and attends to what is kept, a reduction combines the parts. Where there is much to do,
`ffd_keep` makes the test in a launch of its own, so that the work can be shared out evenly over all kv heads. A
launch boundary is the cheapest grid-wide barrier (1 to 2 us inside a graph) and lets each stage have tiles and warps
of its own. Little crosses it: a maximum per sub-block, a zero point per block, the list, partial outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ffd.kernels.ffd_attend import ffd_attend
from ffd.kernels.ffd_keep import ffd_keep
from ffd.kernels.ffd_reduce import ffd_reduce
from ffd.kernels.ffd_scan import ffd_scan
from ffd.kernels.ffd_scratch import FFDScratch
from ffd.kernels.launch import scratch_of

if TYPE_CHECKING:
    from ffd.ffd_layer import FFDLayer


def ffd_decode(
    layer: FFDLayer,
    q: Tensor,
    scale: float,
    *,
    token: tuple[Tensor, Tensor] | None = None,
    return_logsumexp: bool = False,
    return_kept: bool = False,
) -> Any:
    """Attend to the kept sub-blocks and the tail of each row; adds one step to the layer's ledger.

    Parameters
    ----------
    layer
        Storage, its lengths on the device already counting the current token.
    q
        [B, Hq, d], fp16, bf16 or fp32.
    scale
        Softmax scale.
    token
        Keys and values [B, Hkv, 1, d] to be stored in slot ``lengths - 1`` first; None if they are there.
    return_logsumexp
        Also return float32 [B, Hq], natural units, of the keys as stored (centred, if the method centres).
    return_kept
        Also return bool [B, Hkv, capacity / sub_block, G]: sub-blocks that pass for each head of the
        group (their union over the group is attended to); False beyond a row's complete blocks.

    Returns
    -------
    Tensor or tuple
        out [B, Hq, d] in the dtype of ``q``, then what was asked for.
    """
    q = q.contiguous()
    scratch = scratch_of(layer.ledger, lambda: FFDScratch.allocate(layer))
    g = layer.geometry
    logsumexp = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_logsumexp else None
    kept = scratch.kept
    if return_kept:
        units = layer.codes.shape[2] // layer.method.test_size
        kept = torch.zeros(g.batch_size, g.num_kv_heads, units, g.group_size, dtype=torch.uint8, device=q.device)
    ffd_scan(layer, q, scale, scratch, token)
    if scratch.shared:
        ffd_keep(layer, scratch, kept)
    ffd_attend(layer, q, scale, scratch, kept)
    out = torch.empty_like(q)
    ffd_reduce(scratch, out, logsumexp)
    extras = [] if logsumexp is None else [logsumexp]
    if return_kept and kept is not None:
        extras.append(kept.bool())
    return (out, *extras) if extras else out
