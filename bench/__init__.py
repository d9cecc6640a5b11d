"""Benchmarks: each prints a table for people and one JSON line last."""

import model  # noqa: F401 - sets what torch reads as it is loaded
