"""Sparse decoding inside lm-eval: a model class, lm-eval's command line with it, and task loading for our runs.

>>> from eval.lm_harness.model import SparseDecodeLM  # doctest: +SKIP
>>> lm = SparseDecodeLM("smollm2_135m", method="ffd", delta=7)  # doctest: +SKIP
>>> lm_eval.simple_evaluate(model=lm, tasks=["gsm8k"], limit=10)  # doctest: +SKIP

``python -m eval.lm_harness --model ffd --model_args pretrained=...,method=ffd,delta=7 --tasks ...`` is lm-eval's
own command line. This package imports lm-eval only where it is used; see docs/benchmarks/lm_eval.md.
"""
