"""Which two engines can be stepped by one forward of their model, and what is fused in it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from ffd.engine import Engine
from ffd.fusion import Fusion


def why_not_paired(first: Engine, second: Engine) -> str | None:
    """Reason why two engines on one model take their decode steps one after the other, or None.

    A pair steps as each engine would by itself: captured or not, with the same modules fused.

    Parameters
    ----------
    first, second
        Engines on the same model.
    """
    if first.rows != second.rows:
        return f"batches of {first.rows} and {second.rows} rows"
    if first.cache.sliding_layers:
        return f"{first.cache.sliding_layers} sliding-window layers use a cache that is not ours"
    if (first.eager_reason is None) != (second.eager_reason is None):
        return f"steps of one engine alone are captured: {first.eager_reason or second.eager_reason}"
    if _kinds(first._fusion) != _kinds(second._fusion):
        return "the engines do not fuse the same modules"
    together = fusion_of(first, second)
    if _kinds(together) != _kinds(first._fusion):
        reasons = {kind: why for kind, why in together.refused.items() if kind not in first.unfused} or first.unfused
        return f"{first.rows + second.rows} rows do not fuse what {first.rows} fuse: {'; '.join(reasons.values())}"
    return None


_fusions: WeakKeyDictionary[Engine, Fusion] = WeakKeyDictionary()


def fusion_of(first: Engine, second: Engine) -> Fusion:
    """What is fused in steps of both: what passes its check at their rows together, where the first fuses anything."""
    if not first.fused:
        return first._fusion
    if first not in _fusions:
        from ffd.fused_model import fuse

        _fusions[first] = fuse(first.model, first.rows + second.rows)
    return _fusions[first]


def _kinds(fusion: Fusion) -> tuple[set[str], set[str]]:
    """What is fused and, where anything is, what is not: why nothing is may differ."""
    return set(fusion.fused), set(fusion.refused) if fusion.fused else set()
