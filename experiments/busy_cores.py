"""Advice for a run on a CPU whose cores are at work already: OpenMP's threads wait for each other there."""

from __future__ import annotations

import os

_CROWDED = 1.5
"""Processes per core that are ready to run; a run of its own, with a thread a core, brings a machine to 1."""


def advice(device: str) -> str | None:
    """One line where a run will be several times slower than it need be, else None.

    Parameters
    ----------
    device
        ``cpu``, or the name of a GPU, which does the work then.
    """
    cores = os.cpu_count() or 1
    if device != "cpu" or cores == 1 or os.environ.get("OMP_NUM_THREADS") or not hasattr(os, "getloadavg"):
        return None
    try:
        load = os.getloadavg()[0]
    except OSError:  # unobtainable, as in some containers
        return None
    if load <= _CROWDED * cores:
        return None
    return (
        f"load average {load:.1f} on {cores} cores: their threads wait for each other, which can make a run several "
        "times slower; OMP_NUM_THREADS=1 (or 2) before the command avoids that"
    )
