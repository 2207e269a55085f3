"""Sparse-attention decoding for long contexts: methods, fused Triton kernels, and a seam to transformers."""

__version__ = "0.1.0"
