"""One decode step of one layer on a GPU: every method against dense attention's best kernels (docs/performance.md).

All but `runner` needs torch and triton only, so that ``python -m experiments.kernel`` runs on a bare GPU machine.
"""
