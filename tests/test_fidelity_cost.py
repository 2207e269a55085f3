"""What a probed step costs: operations and reads by the host, which on a GPU are its time, do not grow with layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eval.fidelity import FidelityProbe, FidelityState
from eval.fidelity.accumulate import WITH_HISTOGRAM
from eval.fidelity.layer_step import LayerStep, compare
from eval.fidelity.stacked import StackedLayers, signature
from ffd import FFD, Engine, Method
from ffd.cache import DecodeHandle
from ffd.methods import Selection, create, method_class, method_names
from tests.tiny import random_prompt, tiny_model
from tests.toy_method import Strided, StridedLayer

READS = {"item", "_local_scalar_dense", "nonzero", "is_nonzero", "equal"}
"""Operations that wait for the device."""

METHODS = [
    *(create(name, method_class(name).small_knobs) for name in method_names()),
    FFD(delta=1.0, block_size=64, sub_block=32, centre=True, select_per="head"),
    FFD(deltas=tuple((0.5 * layer,) * 6 for layer in range(3)), block_size=64, residual="e4m3"),
    create("quest", {"token_budget": 64, "select_per": "group", "skip_layers": 0}),
    create("topk", {"token_budget": 48, "select_per": "group", "granularity": "page"}),
    Strided(),
]


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(method: Method, layers: int) -> Counter[str]:
    """Operations of one probed decode step, those of the model left out."""
    probe, mode = FidelityProbe(64), Operations()
    model = tiny_model("llama", heads=6, kv_heads=2, layers=layers)

    def counting(handle: DecodeHandle, q: Tensor, scale: float, out: Tensor) -> None:
        with mode:
            probe(handle, q, scale, out)

    Engine(model, method, capacity=200, executor="reference", probe=counting).generate([random_prompt(150)], 2)
    assert probe.take().steps.tolist() == [1] * layers
    return mode.counts


def test_a_probed_step_costs_the_same_whatever_the_layers() -> None:
    few, many = (operations(FFD(block_size=64), layers) for layers in (2, 12))
    assert few == many
    assert many.total() <= 680  # views included
    assert sum(many[name] for name in READS) == 0  # the host goes on to the next steps while the device compares


def test_layers_that_do_not_fit_at_once_are_added_together(monkeypatch: pytest.MonkeyPatch) -> None:
    together = operations(FFD(block_size=64), 4)
    monkeypatch.setattr("eval.fidelity.probe.BYTES_AT_ONCE", 1)
    apart = operations(FFD(block_size=64), 4)
    assert apart["sort"] == 4 * together["sort"]
    assert apart["scatter_add_"] == together["scatter_add_"] == len(WITH_HISTOGRAM)


@pytest.mark.parametrize("name", [name for name in method_names() if name != "dense"])
def test_no_method_pays_much_for_a_layer(name: str) -> None:
    method = create(name, method_class(name).small_knobs)
    few, many = (operations(method, layers) for layers in (2, 6))
    assert (many.total() - few.total()) / 4 <= 3  # what vmap cannot batch
    assert sum(many[name] for name in READS) == 0


def layer_steps(method: Method, dtype: torch.dtype = torch.float32) -> list[LayerStep]:
    """The last decode step of three layers and two ragged rows."""
    steps: dict[int, LayerStep] = {}

    def keep(handle: DecodeHandle, q: Tensor, scale: float, out: Tensor) -> None:
        assert handle.shadow is not None
        steps[handle.layer_idx] = LayerStep(handle.storage, handle.shadow, q, scale, out)

    Engine(
        tiny_model("llama", heads=6, kv_heads=2, layers=3).to(dtype),
        method,
        capacity=400,
        batch_size=2,
        executor="reference",
        probe=keep,
        probe_every=1,
    ).generate([random_prompt(300, 1), random_prompt(211, 2)], 4)
    return list(steps.values())


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_layers_select_together_what_each_selects(method: Method, dtype: torch.dtype) -> None:
    steps = layer_steps(method, dtype)
    assert len({str(step.kind) for step in steps}) == 1
    together = StackedLayers([step.storage for step in steps])
    got = together.select(torch.stack([step.q for step in steps]), steps[0].scale)
    alone = [step.storage.select(step.q, step.scale) for step in steps]
    for name, value in vars(got).items():
        parts = [getattr(selection, name) for selection in alone]
        if value is None:
            assert parts == [None] * 3
            continue
        rows = 2 if name in ("lengths", "scanned", "estimated") else (2, 6)
        expected = torch.cat([part.expand(rows) if part.ndim < 2 else part for part in parts])
        # To the order of the products' sums.
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)
    values = torch.cat([step.storage.stored_values(9) for step in steps])
    assert torch.equal(together.stored_values(9), values)
    own = torch.cat([step.dense.stored_values(9) for step in steps])
    assert torch.equal(values, own) == steps[0].storage.values_exact


def test_values_of_a_methods_own_are_exact_only_where_it_says_so() -> None:
    class Rounded(StridedLayer):
        def stored_values(self, num_tokens: int) -> Tensor:
            return super().stored_values(num_tokens).half()

    class Before:
        def stored_values(self, num_tokens: int) -> Tensor:
            return super().stored_values(num_tokens).half()  # type: ignore[misc, no-any-return]

    class RoundedBefore(Before, StridedLayer): ...

    class StoredRounded(StridedLayer):
        def append(self, keys: Tensor, values: Tensor) -> None:
            super().append(keys, values.round())

    class SaysSo(Rounded):
        values_exact = True

    class Inherits(SaysSo): ...

    assert [layer.values_exact for layer in (StridedLayer, SaysSo, Inherits)] == [True] * 3
    assert [layer.values_exact for layer in (Rounded, RoundedBefore, StoredRounded)] == [False] * 3


@dataclass(frozen=True)
class Reading(Strided):
    """A method whose layers look at their own numbers on the host."""

    name = "reading"

    def new_layer(self, *args: Any) -> StridedLayer:
        return ReadingLayer(self, *args)


class ReadingLayer(StridedLayer):
    """Refuses values that are not finite."""

    def select(self, q: Tensor, scale: float) -> Selection:
        assert bool(self.keys.isfinite().all())
        return super().select(q, scale)


def observed(method: Method) -> FidelityState:
    """The state of a short run."""
    probe = FidelityProbe(64)
    model = tiny_model("llama", heads=6, kv_heads=2)
    Engine(model, method, capacity=200, executor="reference", probe=probe).generate([random_prompt(150)], 2)
    return probe.take()


def test_a_method_that_reads_its_numbers_is_compared_layer_by_layer() -> None:
    with pytest.warns(UserWarning, match="ReadingLayer: layers are compared one by one"):
        alone = observed(Reading())
    for name, value in observed(Strided())._tensors().items():
        torch.testing.assert_close(alone._tensors()[name], value, rtol=1e-12, atol=1e-12)


def test_layers_that_differ_in_more_than_tensors_are_told_apart() -> None:
    first, second, _ = (step.storage for step in layer_steps(Strided()))
    assert signature(first) == signature(second)
    second.stride = 5  # type: ignore[attr-defined]
    assert signature(first) != signature(second)
    second.stride = first.stride  # type: ignore[attr-defined]
    second.notes = [torch.zeros(1)]  # type: ignore[attr-defined]
    first.notes = [torch.ones(1)]  # type: ignore[attr-defined]
    assert signature(first) != signature(second)


def test_values_that_are_not_known_leave_their_metrics_out() -> None:
    steps = layer_steps(Strided())
    names = [compare([replace(step, out=out) for step in steps], 64).keys() for out in (None, steps[0].out)]
    assert names[1] - names[0] == {"output_cos", "output_rel_error", "executor_rel_error"}
