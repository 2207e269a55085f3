"""The runner of ``task=lm_eval``: lm-eval evaluates, our model answers, our store keeps."""

from experiments.lm_eval.run import run_lm_eval

__all__ = ["run_lm_eval"]
