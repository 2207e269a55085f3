"""Fused Triton kernels, one idea per file; `common` holds the device functions they share."""
