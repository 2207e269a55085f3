"""RULER (NVIDIA/RULER at c3f5e3b): 13 synthetic long-context tasks, identical to the official generators."""

from eval.ruler.config import RulerConfig
from eval.ruler.rows import official_row
from eval.ruler.suite import LengthStatistics, RulerSuite, length_statistics
from eval.ruler.tasks import TASKS

__all__ = ["TASKS", "LengthStatistics", "RulerConfig", "RulerSuite", "length_statistics", "official_row"]
