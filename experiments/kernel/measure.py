"""From points of a grid to rows: fill layers, gate them, time them, with dense baselines beside them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from experiments.errors import first_line
from experiments.kernel import baselines, gate, timing
from experiments.kernel.baselines import Library
from experiments.kernel.beside import DENSE, Beside
from experiments.kernel.gate import GateError, Passed, relative_error
from experiments.kernel.grid import BLOCK, Entry, Mode, Point, Shape
from experiments.kernel.layers import Filled, fill
from experiments.kernel.rows import DENSE_RULE, Item, Refusal, Row, label, refusal_label
from experiments.kernel.session import Session
from experiments.kernel.source import Planting, Step
from experiments.kernel.stages import Stage, floor_bytes, stages, whole_step
from ffd.methods import KnobError


class PointRun:
    """Rows of one point.

    Parameters
    ----------
    point
        What to time.
    bandwidth
        Measured read bandwidth in bytes per us.
    device
        ``cuda``, or ``cpu`` where kernels are interpreted.
    captured
        Steps of a real model, one per recorded layer; None plants keys.
    seed
        Of planted keys.
    session
        What is measured already, to which this point's items are added; a new one by default.
    """

    def __init__(
        self,
        point: Point,
        bandwidth: float,
        device: str,
        *,
        captured: Sequence[Step] | None = None,
        seed: int = 0,
        session: Session | None = None,
    ) -> None:
        self.point, self.shape, self.captured = point, point.shape, captured
        self.bandwidth, self.device, self.seed = bandwidth, device, seed
        self.session = session or Session()
        self.dense = Beside(self.shape, self.session)

    @cached_property
    def planting(self) -> Planting:
        """Keys to plant hot blocks in; made once for all kept fractions."""
        return Planting(self.shape, self.device, self.seed)

    def rows(self) -> Iterator[Item]:
        """What is not done yet, as it is measured.

        Where anything is, dense attention is timed by this process too: rows stand beside baselines of their own one.
        """
        dense, modes = self.dense, self.point.modes
        if not dense.lacks(modes, self.session.items) and not any(map(self._is_pending, self.point.entries)):
            return
        if dense.lacks(modes, self.session.dense):
            yield from self._guarded([dense.refusal(name) for name in dense.names], self._dense)
        for entry in self.point.entries:
            if self._is_pending(entry):
                yield from self._guarded([refusal_label(entry, self.shape)], partial(self._sparse, entry))

    def _guarded(self, refusals: Sequence[str], make: Callable[[], Iterator[Item]]) -> Iterator[Item]:
        """Rows, each beside the dense ones of its mode; or why there are none.

        ``refusals`` are labels for the latter: first of what is made, then of what has no reference without it.
        """
        try:
            for item in make():
                yield self._kept(item)
            for name in refusals:
                self.session.settle(name)
        except Exception as error:  # one method's failure must not cost the others their rows
            reason, wrong = refused_for(error)
            for name in refusals:
                why = reason if name == refusals[0] else f"no reference to compare with: {reason}"
                if not self.session.is_refused(name):
                    yield self._kept(Refusal(name, why, wrong))
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _kept(self, item: Item) -> Item:
        found = self.dense.beside(item) if isinstance(item, Row) else item
        self.session.keep(found)
        return found

    def _is_pending(self, entry: Entry) -> bool:
        refusal = refusal_label(entry, self.shape)
        if self.session.is_refused(refusal):
            return False
        step = whole_step(entry.method, self.shape)
        wanted = [(mode, step) for mode in self.point.modes]
        wanted += [(self.point.modes[0], stage.names) for stage in self._stages(entry)]
        return self.session.failed_before(refusal) or not all(
            self.dense.is_timed(label(entry.label, self.shape, mode, step), mode) for mode, step in wanted
        )

    def _stages(self, entry: Entry) -> tuple[Stage, ...]:
        return stages(entry.method, self.shape) if self.point.stages else ()

    def _fill(self, entry: Entry) -> Filled:
        if self.captured is None:
            inputs: Sequence[Step] = [self.planting.step(entry.kept or 1.0)]
        else:
            inputs = self.captured
        return fill(entry.method, self.shape, inputs, cold=any(mode.l2 == "cold" for mode in self.point.modes))

    def _sparse(self, entry: Entry) -> Iterator[Item]:
        filled = self._fill(entry)
        missed = missed_target(entry, self.shape, filled.passed.kept)
        if missed is None:
            yield from self._timed(entry, filled, self.dense.is_timed)
        else:
            yield Refusal(refusal_label(entry, self.shape), missed, wrong=False)

    def _timed(self, entry: Entry, filled: Filled, is_done: Callable[[str, Mode], bool]) -> Iterator[Row]:
        method, passed = entry.method, filled.passed
        size, rule = floor_bytes(method, filled.layers[0][0], self.shape, passed)

        wanted: list[tuple[Mode, str, Callable[[Any, Step], object], float]]
        wanted = [(mode, whole_step(method, self.shape), gate.run, size) for mode in self.point.modes]
        for stage in self._stages(entry):
            wanted.append((self.point.modes[0], stage.names, stage.launch, stage.bytes(self.shape, passed.kept)))
        for mode, step, one, size in wanted:
            if is_done(label(entry.label, self.shape, mode, step), mode):
                continue
            hot = mode.l2 == "hot"
            spent = timing.duration(filled.run(one, hot=hot), filled.calls(hot=hot), mode.timing)
            yield self._row(entry, passed, mode, step, spent, size, rule)

    def _dense(self) -> Iterator[Item]:
        """The libraries' dense attention and ours, all before the first is compared with the fastest."""
        filled = self._fill(DENSE)
        items: list[Item] = list(self._timed(DENSE, filled, lambda name, _: name in self.session.dense))
        wanted = [expected.out for expected in filled.expected]
        inputs, sets = [step for _, step in filled.layers[: len(wanted)]], len(filled.layers)
        del filled
        kernels = {k: v for k, v in self.dense.libraries.items() if not self.session.is_refused(self.dense.refusal(k))}
        steps = baselines.copies(inputs, sets) if any(isinstance(one, Library) for one in kernels.values()) else []
        for name, library in kernels.items():
            why = self.dense.refusal(name)
            if isinstance(library, str):
                items.append(Refusal(why, library, wrong=False))
                continue
            try:
                outputs = library.outputs(steps[: len(wanted)])
                errors = [relative_error(o, w) for o, w in zip(outputs, wanted, strict=True)]
                items += self._library_rows(name, library, steps, max(errors))
            except RuntimeError as error:  # the backend does not take this shape
                items.append(Refusal(why, first_line(error), wrong=False))
            except Exception as error:  # one library's failure must not cost the others their rows
                items.append(Refusal(why, *refused_for(error)))
        self.session.dense |= {item.label: item for item in items if isinstance(item, Row)}
        for item in items:
            if isinstance(item, Refusal) or not self.dense.is_timed(item.label, item.mode):
                yield item

    def _library_rows(self, name: str, library: Library, steps: Sequence[Step], error: float) -> Iterator[Row]:
        size = 2 * steps[0].keys.numel() * steps[0].keys.element_size()
        passed = Passed(error, 0.0, 1.0, size, 0.0)
        for mode in self.point.modes:
            if self.dense.label(name, mode) in self.session.dense:
                continue
            chosen = steps[:1] if mode.l2 == "hot" else steps
            spent = timing.duration(library.run(chosen), len(chosen), mode.timing)
            yield replace(self._row(DENSE, passed, mode, baselines.STEP, spent, size, DENSE_RULE), method=name)

    def _row(self, entry: Entry, passed: Passed, mode: Mode, step: str, time_us: float, size: float, rule: str) -> Row:
        s, floor = self.shape, size / self.bandwidth
        return Row(
            method=entry.method.label, knobs=plain(entry.method.knobs()), storage=storage(entry.method.knobs()),
            B=s.B, T=s.T, Hq=s.Hq, Hkv=s.Hkv, d=s.d, dtype=s.dtype, trace=s.trace,
            kept_target=entry.kept, kept=passed.kept, source="captured" if s.trace else "planted",
            timing=mode.timing, l2=mode.l2, step=step.split(), time_us=time_us, bytes=size, bytes_rule=rule,
            floor_us=floor, efficiency=floor / time_us, sdpa_flash_us=None, best_dense_us=None,
            rel_error=passed.rel_error, ledger_error=passed.ledger_error, sparse_steps=passed.sparse_steps,
        )  # fmt: skip


def missed_target(entry: Entry, shape: Shape, kept: float) -> str | None:
    """Why a row would be mislabelled: it keeps another share than its target, by a block and by a tenth; else None."""
    if entry.kept is None or abs(kept - entry.kept) <= max(BLOCK / shape.T, 0.1 * entry.kept):
        return None
    return f"keeps {kept:.3f} of the tokens with these keys and knobs, expected {entry.kept:g}"


def refused_for(error: Exception) -> tuple[str, bool]:
    """Why there is no row, and whether that is wrong rather than not to be had here."""
    if isinstance(error, GateError):
        return str(error), True
    if isinstance(error, KnobError):
        return str(error), False
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "does not fit the GPU's memory", False
    return f"{type(error).__name__}: {first_line(error)}", True


def storage(knobs: Mapping[str, Any]) -> str:
    """How keys and values are kept, in short: residual and block of FFD, bits of a low-bit cache."""
    if "residual" in knobs:
        return f"{knobs['residual']} block {knobs['block_size']}"
    return f"{knobs['bits']} bit" if "bits" in knobs else "16 bit"


def plain(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Knobs that are set, JSON-ready."""
    return {k: str(v) if v == float("inf") else v for k, v in knobs.items() if v is not None}
