"""Turns on a link: how many have one at once, in which order they come, and what is left of one that gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from decode.turns import Turns


class Line:
    """Those who want a turn, by their number; `having` it are those who have not left it."""

    def __init__(self, turns: Turns, amounts: Sequence[int]) -> None:
        self.having: list[int] = []
        self._leave = [asyncio.Event() for _ in amounts]
        self.tasks = [asyncio.create_task(self._have(turns, *each)) for each in enumerate(amounts)]

    async def _have(self, turns: Turns, number: int, amount: int) -> None:
        async with turns.turn(amount):
            self.having.append(number)
            try:
                await self._leave[number].wait()
            finally:
                self.having.remove(number)

    async def leave(self, *numbers: int) -> list[int]:
        """Returns who has a turn when all is quiet again."""
        for number in numbers:
            self._leave[number].set()
        for _ in range(20):
            await asyncio.sleep(0)
        return self.having


async def test_as_many_as_are_allowed_in_the_order_in_which_they_came() -> None:
    line = Line(Turns(most=3, budget=100), [1] * 6)
    assert await line.leave() == [0, 1, 2]
    assert await line.leave(1) == [0, 2, 3]
    assert await line.leave(0, 2) == [3, 4, 5]
    assert await line.leave(3, 4, 5) == []


async def test_as_many_as_the_budget_has_room_for_and_nobody_is_passed_by() -> None:
    line = Line(Turns(most=9, budget=100), [40, 40, 30, 10, 10])
    assert await line.leave() == [0, 1]  # the third does not fit, and the small ones wait behind it
    assert await line.leave(0) == [1, 2, 3, 4]


async def test_two_fit_however_much_they_take() -> None:
    line = Line(Turns(most=9, budget=100), [1000, 70, 10])
    assert await line.leave() == [0, 1]
    assert await line.leave(0) == [1, 2]


async def test_whoever_gives_up_takes_nothing() -> None:
    line = Line(Turns(most=1, budget=100), [60] * 4)
    assert await line.leave() == [0]
    line.tasks[1].cancel()  # the first of those that wait
    line.tasks[2].cancel()
    assert await line.leave() == [0]
    assert await line.leave(0) == [3]
    line.tasks[3].cancel()  # having its turn
    assert await line.leave() == []


async def test_all_is_free_again_after_a_failure() -> None:
    turns = Turns(most=2, budget=100)
    for _ in range(3):
        try:
            async with AsyncExitStack() as stack:
                for amount in (50, 50):
                    await asyncio.wait_for(stack.enter_async_context(turns.turn(amount)), 1)
                raise RuntimeError("as the test wants it")
        except RuntimeError:
            continue
