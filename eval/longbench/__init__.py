"""LongBench v1 and LongBench-E, as the official code runs and scores them."""

from eval.longbench.config import LongBenchConfig
from eval.longbench.official_files import official_row
from eval.longbench.suite import LongBenchSuite

__all__ = ["LongBenchConfig", "LongBenchSuite", "official_row"]
