"""Which blocks have arrived, when layers of runs arrive in any order."""

from __future__ import annotations

import random

import numpy as np

from kvtransfer.runs import Arrived, Part, Run, merged

NUM_LAYERS = 4


def run(start: int, num_blocks: int) -> Run:
    ids = tuple(range(num_blocks))
    return Run(ids, start, np.array(ids, np.int32), np.array(ids, np.int32), ())


def test_blocks_count_once_all_layers_of_all_before_them_are_there() -> None:
    first, second, third = run(0, 3), run(3, 2), run(5, 4)
    arrived = Arrived(NUM_LAYERS)
    assert not arrived.add([Part(second, range(4)), Part(first, range(3))])
    assert arrived.num_blocks == 0
    assert arrived.add([Part(first, range(3, 4))])
    assert arrived.num_blocks == 5
    assert not arrived.add([Part(third, range(2))])
    assert arrived.add([Part(third, range(2, 4))])
    assert arrived.num_blocks == 9


def test_any_order_comes_to_the_same() -> None:
    rng = random.Random(5)
    for _ in range(200):
        sizes = [rng.randint(1, 5) for _ in range(4)]
        runs = [run(sum(sizes[:index]), size) for index, size in enumerate(sizes)]
        parts = [Part(one, range(layer, layer + 1)) for one in runs for layer in range(NUM_LAYERS)]
        rng.shuffle(parts)
        arrived, there = Arrived(NUM_LAYERS), list[Part]()
        for part in parts:
            there.append(part)
            arrived.add([part])
            whole = [sum(other.run is one for other in there) == NUM_LAYERS for one in runs]
            num_whole = whole.index(False) if False in whole else len(runs)
            assert arrived.num_blocks == sum(sizes[:num_whole])


def test_neighbouring_layers_of_a_run_are_one_part() -> None:
    one, other = run(0, 3), run(3, 2)
    layers = [(one, 0), (one, 1), (one, 3), (other, 0), (other, 1), (one, 2)]
    found = merged([Part(run, range(layer, layer + 1)) for run, layer in layers])
    assert found == [Part(one, range(2)), Part(one, range(3, 4)), Part(other, range(2)), Part(one, range(2, 3))]
