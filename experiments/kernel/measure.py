"""From points of a grid to rows: fill layers, gate them, time them, with dense baselines beside them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from experiments.kernel import baselines, gate, timing
from experiments.kernel.baselines import Library
from experiments.kernel.gate import GateError, Passed, relative_error
from experiments.kernel.grid import BLOCK, Entry, Mode, Point, Shape
from experiments.kernel.layers import Filled, fill
from experiments.kernel.rows import DENSE_RULE, Refusal, Row, label, refusal_label
from experiments.kernel.source import Planting, Step
from experiments.kernel.stages import Stage, floor_bytes, stages, whole_step
from ffd.methods import KnobError
from ffd.methods.dense import Dense

DENSE = Entry(Dense(), 1.0)
Item = Row | Refusal


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
    done
        What need not be timed again, by label.
    """

    def __init__(
        self,
        point: Point,
        bandwidth: float,
        device: str,
        *,
        captured: Sequence[Step] | None = None,
        seed: int = 0,
        done: Mapping[str, Item] | None = None,
    ) -> None:
        self.point, self.shape, self.captured = point, point.shape, captured
        self.bandwidth, self.device, self.seed = bandwidth, device, seed
        self.done = done or {}

    @cached_property
    def planting(self) -> Planting:
        """Keys to plant hot blocks in; made once for all kept fractions."""
        return Planting(self.shape, self.device, self.seed)

    def rows(self) -> Iterator[Item]:
        """What is not done yet, as it is measured."""
        pending = [entry for entry in self.point.entries if self._is_pending(entry)]
        if self._is_pending(DENSE):
            yield from self._guarded(DENSE, self._dense)
        elif not pending:
            return
        for entry in pending:
            yield from self._guarded(entry, partial(self._sparse, entry))

    def _guarded(self, entry: Entry, make: Callable[[], Iterator[Item]]) -> Iterator[Item]:
        """Rows, each beside the dense ones of its mode; or why there are none."""
        try:
            for item in make():
                if isinstance(item, Row):
                    item = self._beside_dense(item)
                self.done = {**self.done, item.label: item}
                yield item
        except GateError as error:
            yield Refusal(refusal_label(entry, self.shape), str(error), wrong=True)
        except KnobError as error:
            yield Refusal(refusal_label(entry, self.shape), str(error), wrong=False)
        except torch.cuda.OutOfMemoryError:
            yield Refusal(refusal_label(entry, self.shape), "does not fit the GPU's memory", wrong=False)
        except Exception as error:  # one method's failure must not cost the others their rows
            yield Refusal(refusal_label(entry, self.shape), f"{type(error).__name__}: {first_line(error)}", wrong=True)
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _is_pending(self, entry: Entry) -> bool:
        if refusal_label(entry, self.shape) in self.done:
            return False
        step = whole_step(entry.method, self.shape)
        wanted = [label(entry.label, self.shape, mode, step) for mode in self.point.modes]
        wanted += [label(entry.label, self.shape, self.point.modes[0], s.names) for s in self._stages(entry)]
        return any(name not in self.done for name in wanted)

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
            yield from self._timed(entry, filled)
        else:
            yield Refusal(refusal_label(entry, self.shape), missed, wrong=False)

    def _timed(self, entry: Entry, filled: Filled) -> Iterator[Row]:
        method, passed = entry.method, filled.passed
        size, rule = floor_bytes(method, filled.layers[0][0], self.shape, passed)

        wanted: list[tuple[Mode, str, Callable[[Any, Step], object], float]]
        wanted = [(mode, whole_step(method, self.shape), gate.run, size) for mode in self.point.modes]
        for stage in self._stages(entry):
            wanted.append((self.point.modes[0], stage.names, stage.launch, stage.bytes(self.shape, passed.kept)))
        for mode, step, one, size in wanted:
            if label(entry.label, self.shape, mode, step) in self.done:
                continue
            hot = mode.l2 == "hot"
            spent = timing.duration(filled.run(one, hot=hot), filled.calls(hot=hot), mode.timing)
            yield self._row(entry, passed, mode, step, spent, size, rule)

    def _dense(self) -> Iterator[Item]:
        """The libraries' dense attention and ours, all before the first is compared with the fastest."""
        filled = self._fill(DENSE)
        items: list[Item] = list(self._timed(DENSE, filled))
        wanted = [expected.out for expected in filled.expected]
        inputs, sets = [step for _, step in filled.layers[: len(wanted)]], len(filled.layers)
        del filled
        kernels = baselines.libraries(self.shape.B)
        steps = baselines.copies(inputs, sets) if any(isinstance(one, Library) for one in kernels.values()) else []
        for name, library in kernels.items():
            why = f"{name} {self.shape.label}"
            if isinstance(library, str):
                items.append(Refusal(why, library, wrong=False))
                continue
            try:
                outputs = library.outputs(steps[: len(wanted)])
                errors = [relative_error(o, w) for o, w in zip(outputs, wanted, strict=True)]
                items += self._library_rows(name, library, steps, max(errors))
            except GateError as error:
                items.append(Refusal(why, str(error), wrong=True))
            except RuntimeError as error:  # the backend does not take this shape
                items.append(Refusal(why, first_line(error), wrong=False))
        self.done = {**self.done, **{item.label: item for item in items}}
        yield from items

    def _library_rows(self, name: str, library: Library, steps: Sequence[Step], error: float) -> Iterator[Row]:
        size = 2 * steps[0].keys.numel() * steps[0].keys.element_size()
        passed = Passed(error, 0.0, 1.0, size, 0.0)
        for mode in self.point.modes:
            chosen = steps[:1] if mode.l2 == "hot" else steps
            spent = timing.duration(library.run(chosen), len(chosen), mode.timing)
            row = self._row(DENSE, passed, mode, baselines.STEP, spent, size, DENSE_RULE)
            if (row := replace(row, method=name)).label not in self.done:
                yield row

    def _beside_dense(self, row: Row) -> Row:
        """The row with dense times of the same shape and way of timing."""
        times = {
            other.method: other.time_us
            for other in self.done.values()
            if isinstance(other, Row) and other.is_dense and (other.conditions == row.conditions)
        }
        return replace(row, sdpa_flash_us=times.get("sdpa_flash"), best_dense_us=min(times.values(), default=None))

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


def first_line(error: Exception) -> str:
    """What an error says, without the rest of a long message."""
    return (str(error).splitlines() or [""])[0]


def storage(knobs: Mapping[str, Any]) -> str:
    """How keys and values are kept, in short: residual and block of FFD, bits of a low-bit cache."""
    if "residual" in knobs:
        return f"{knobs['residual']} block {knobs['block_size']}"
    return f"{knobs['bits']} bit" if "bits" in knobs else "16 bit"


def plain(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Knobs that are set, JSON-ready."""
    return {k: str(v) if v == float("inf") else v for k, v in knobs.items() if v is not None}
