"""Kernels for CPUs with AVX2, AVX-512 or AMX: C compiled on first use, and the parts of a transformer made of them."""
