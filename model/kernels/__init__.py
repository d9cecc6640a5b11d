"""Kernels for CPUs with AVX2: C compiled on first use, and the parts of a transformer made of them."""
