"""Numbers with units as people read them."""

from __future__ import annotations

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def told(value: float, unit: str) -> str:
    """Four digits or fewer, with a prefix: 491.5 MB, 23.5 ms, 0.83; counts with their thousands."""
    if unit == "s":
        return _seconds(value)
    if unit == "$":
        return f"${value:.4g}"
    if not unit:
        return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    for scale, prefix in _PREFIXES:
        if abs(value) >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _seconds(value: float) -> str:
    if abs(value) >= 10:
        return f"{value:.0f} s"
    if abs(value) >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 or value == 0 else f"{value * 1e6:.3g} us"
