from __future__ import annotations

import pytest

from router.figure import figure


def test_a_figure_is_its_formula_with_the_numbers_put_in() -> None:
    kv = figure("KV", "B", "2 * layers * heads * size * bytes", layers=80, heads=8, size=128, bytes=2)
    assert kv.value == 327_680
    assert kv.worked == "2 * 80 * 8 * 128 * 2"
    request = figure("request", "B", "kv * tokens", kv=kv, tokens=1500)
    assert (request.value, request.worked) == (491_520_000, "327680 * 1500")
    assert dict(request.given) == {"kv": 327_680, "tokens": 1500}


def test_names_of_functions_stay_in_what_is_shown() -> None:
    assert figure("x", "", "min(floor(pool / one), 3e9)", pool=1.25e12, one=7).worked == "min(floor(1.25e12 / 7), 3e9)"


@pytest.mark.parametrize("given", [{"a": 1}, {"a": 1, "b": 2, "c": 3}])
def test_numbers_that_the_formula_lacks_or_does_not_name_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(TypeError, match=r"needs \['a', 'b'\]"):
        figure("sum", "", "a + b", **given)
