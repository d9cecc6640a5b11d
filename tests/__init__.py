"""Mirrors the packages; cluster/ runs the whole system. A package, lest somebody's installed `tests` be taken for it."""
