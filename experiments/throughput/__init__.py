"""Whole decode steps of a model, timed: ``python run.py runner=throughput``, or ``python -m experiments.throughput``.

The second way needs torch and transformers only: everything but `run` and `subject` keeps to them.
"""
