"""The throughput runner: whole decode steps of a model geometry, dense and sparse, as a JSON record.

``python -m experiments.throughput --out analysis/measurements/throughput-h200.json`` needs torch and
transformers only, so that it runs on a bare GPU machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.environment import device_class, git_revision, versions
from experiments.kernel_bench import read_bandwidth
from experiments.throughput_bench import measure

DEFAULT_GRID = ((1, 16384), (8, 65536))


def llama_8b() -> Any:
    """Configuration with the geometry of Llama-3.1-8B."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )


def point(text: str) -> tuple[int, int]:
    """Parse ``BxT``."""
    batch, _, tokens = text.partition("x")
    return int(batch), int(tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the grid and write the record after every row, so that an interruption loses none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON record to write")
    parser.add_argument("--grid", type=point, nargs="+", default=list(DEFAULT_GRID), help="points as BxT, e.g. 1x16384")
    parser.add_argument("--kept", type=float, nargs="+", default=[0.18], help="kept fractions of FFD")
    parser.add_argument("--revision", default=git_revision()["commit"], help="revision, where there is no checkout")
    given = parser.parse_args(arguments)
    bandwidth = read_bandwidth() * 1e6
    record: dict[str, Any] = {
        "gpu": device_class(),
        "versions": versions(("torch", "triton", "transformers")),
        "revision": given.revision,
        "date": datetime.date.today().isoformat(),
        "model": "geometry of Llama-3.1-8B, random weights, bfloat16",
        "read_bandwidth": bandwidth,
        "rows": [],
    }
    for row in measure(llama_8b(), given.grid, given.kept, bandwidth):
        record["rows"].append(row)
        given.out.write_text(json.dumps(record, indent=1) + "\n")
        print(
            f"{row['protocol']} {row['method']} B={row['B']} T={row['T']} kept {row['kept']:.3f}: "
            f"{row['ms_per_step']:.2f} ms, {row['tokens_per_second']:.1f} tok/s, {row['over_floor']:.2f}x floor",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
