"""Which blocks have arrived, when parts of runs arrive in any order."""

from __future__ import annotations

import random

import numpy as np

from kvtransfer.runs import Arrived, Part, Run, merged

NUM_LAYERS = 4


def new_run(start: int, num_blocks: int) -> Run:
    ids = tuple(range(num_blocks))
    return Run(start, ids, np.array(ids, np.int32), np.array(ids, np.int32))


def part(run: Run, first_layer: int, end_layer: int, blocks: range | None = None) -> Part:
    return Part(run, range(first_layer, end_layer), blocks or run.blocks)


def held(parts: list[Part]) -> list[tuple[Run, range, range]]:
    return [(part.run, part.layers, part.blocks) for part in parts]


def test_blocks_count_once_all_layers_of_all_before_them_are_there() -> None:
    first, second, third = new_run(0, 3), new_run(3, 2), new_run(5, 4)
    arrived = Arrived(NUM_LAYERS)
    assert not arrived.add([part(second, 0, 4), part(first, 0, 3)])
    assert arrived.num_blocks == 0
    assert not arrived.add([part(first, 3, 4, range(2))])
    assert arrived.add([part(first, 3, 4, range(2, 3))])
    assert arrived.num_blocks == 5
    assert not arrived.add([part(third, 0, 2)])
    assert arrived.add([part(third, 2, 4)])
    assert arrived.num_blocks == 9


def test_any_order_comes_to_the_same() -> None:
    rng = random.Random(5)
    for _ in range(200):
        sizes = [rng.randint(1, 5) for _ in range(4)]
        runs = [new_run(sum(sizes[:index]), size) for index, size in enumerate(sizes)]
        cells = [(run, layer, block) for run in runs for layer in range(NUM_LAYERS) for block in run.blocks]
        rng.shuffle(cells)
        arrived, there = Arrived(NUM_LAYERS), list[Run]()
        for run, layer, block in cells:
            there.append(run)
            arrived.add([part(run, layer, layer + 1, range(block, block + 1))])
            whole = [there.count(one) == NUM_LAYERS * len(one.blocks) for one in runs]
            num_whole = whole.index(False) if False in whole else len(runs)
            assert arrived.num_blocks == sum(sizes[:num_whole])


def test_indices_are_those_of_the_ticket() -> None:
    assert part(new_run(7, 5), 0, 1, range(2, 4)).indices == range(9, 11)


def test_neighbouring_layers_of_the_same_blocks_are_one_part() -> None:
    one, other = new_run(0, 3), new_run(3, 2)
    layers = [(one, 0), (one, 1), (one, 3), (other, 0), (other, 1), (one, 2)]
    found = merged([part(run, layer, layer + 1) for run, layer in layers])
    assert held(found) == held([part(one, 0, 2), part(one, 3, 4), part(other, 0, 2), part(one, 2, 3)])
    twin = new_run(0, 3)
    assert len(merged([part(one, 0, 1), part(twin, 1, 2)])) == 2
    halves = [part(one, 0, 1, range(2)), part(one, 1, 2, range(2, 3)), part(one, 2, 3, range(2, 3))]
    assert held(merged(halves)) == held([part(one, 0, 1, range(2)), part(one, 1, 3, range(2, 3))])
