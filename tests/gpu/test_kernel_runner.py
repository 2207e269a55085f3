"""The kernel runner on a GPU: graphs, cold layers, libraries' baselines at odd shapes; run it before a long grid."""

from __future__ import annotations

import pytest
import torch

from experiments.kernel.grid import Mode, Shape, point
from experiments.kernel.measure import PointRun
from experiments.kernel.rows import Row
from experiments.kernel.standard import ALL_MODES
from ffd.methods import create, method_names

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ODD = [Shape(1, 2000, 7 * 2, 2, 64), Shape(3, 2048, 7 * 2, 2, 128), Shape(2, 1999, 3, 3, 64, "float16")]


@pytest.mark.parametrize("shape", ODD, ids=lambda shape: shape.label)
def test_sdpa_takes_batches_odd_groups_and_short_heads(shape: Shape) -> None:
    items = list(PointRun(point(shape, {"ffd": {"delta": 5.0}}, (0.5, 1.0)), 1e6, "cuda").rows())
    rows = [item for item in items if isinstance(item, Row)]
    assert {"sdpa_flash", "dense", "ffd"} <= {row.method for row in rows}, items
    assert all(row.time_us > 0 and row.rel_error < 1e-2 for row in rows)
    assert all(row.sdpa_flash_us is not None and row.sdpa_flash_us >= (row.best_dense_us or 0) for row in rows)


def test_every_method_is_timed_in_every_mode() -> None:
    methods = {name: {} for name in method_names()}
    items = list(PointRun(point(Shape(1, 4000), methods, (0.18,), ALL_MODES), 1e6, "cuda").rows())
    rows = [item for item in items if isinstance(item, Row) and item.whole]
    assert {(row.method, row.timing, row.l2) for row in rows} >= {
        (create(name).label, mode.timing, mode.l2) for name in method_names() for mode in ALL_MODES
    }, [item for item in items if not isinstance(item, Row)]


def test_a_cold_cache_is_slower_than_a_hot_one() -> None:
    modes = (Mode("graph", "cold"), Mode("graph", "hot"))
    # 34 MB of keys and values, which a large L2 holds; at 16384 tokens it did not, and the test failed now and then.
    rows = {row.l2: row for row in PointRun(point(Shape(1, 8192), {}, (), modes), 1e6, "cuda").rows()
            if isinstance(row, Row) and row.method == "dense"}  # fmt: skip
    assert rows["cold"].time_us > rows["hot"].time_us
