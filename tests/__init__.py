"""Mirrors the packages; cluster/ runs the whole system. A package, lest an installed `tests` be taken for it."""
