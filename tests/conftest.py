"""Settings of the whole suite."""

from __future__ import annotations

import os

# Tiny tensors on few cores: more threads only wait for each other. Before torch is imported, and for subprocesses.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
