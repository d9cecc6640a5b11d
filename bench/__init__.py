"""Benchmarks: each prints a table for people and one JSON line last."""
