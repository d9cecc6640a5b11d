"""Benchmarks: each prints a table for people and one JSON line last."""

import model  # noqa: F401 - before torch
