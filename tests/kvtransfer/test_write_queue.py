"""Whose write is posted next: streams in turn, awaited ones first, calls before all, and nothing for a full peer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from kvtransfer.write_queue import Batch, WriteQueue


class Rig:
    """Parts are names, of 10 bytes each; a batch has 10 unless said otherwise."""

    def __init__(self, max_puts: int = 100, max_batch_bytes: int = 10) -> None:
        self.queue = WriteQueue[str, str](max_puts, max_batch_bytes)
        self.done: list[str] = []

    def job(self, name: str) -> Callable[[], None]:
        return lambda: self.done.append(name)

    def put(self, stream: str, count: int, first: int = 0) -> None:
        for index in range(first, first + count):
            assert self.queue.put(stream, [(f"{stream}{index}", 10)], 0)

    def take(self, count: int = 100, blocked: str = "") -> list[str]:
        """What comes next; of streams whose names are in `blocked` nothing does. Parts of a batch are joined by +."""
        self.done = []
        for _ in range(count):
            found = self.queue.get(lambda stream: stream not in blocked, 0)
            if found is None:
                break
            if isinstance(found, Batch):
                assert all(part.startswith(found.stream) for part in found.parts)
                self.done.append("+".join(found.parts))
            else:
                found()
        return self.done


def test_streams_have_their_turns_and_each_its_own_order() -> None:
    rig = Rig()
    rig.put("a", 4)
    rig.put("b", 2)
    rig.put("c", 1)
    assert rig.take() == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert len(rig.queue) == 0


def test_who_is_waited_for_goes_first_and_hears_of_its_end_behind_its_writes() -> None:
    rig = Rig()
    rig.put("a", 3)
    rig.put("b", 2)
    rig.put("c", 2)
    rig.queue.put_end("b", rig.job("b is done"))
    rig.queue.put_end("c", rig.job("c is done"))
    rig.put("b", 1, first=2)  # behind the end: somebody waits for what was there before
    assert rig.take() == ["b0", "c0", "b1", "c1", "b is done", "c is done", "b2", "a0", "a1", "a2"]


def test_what_a_stream_has_queued_is_taken_together_up_to_a_bound_and_to_an_end() -> None:
    rig = Rig(max_batch_bytes=35)
    rig.put("a", 8)
    rig.put("b", 2)
    rig.queue.put_end("b", rig.job("b is done"))
    rig.put("b", 1, first=2)
    assert rig.take() == ["b0+b1", "b is done", "b2", "a0+a1+a2", "a3+a4+a5", "a6+a7"]


def test_part_beyond_the_bound_is_taken_alone() -> None:
    rig = Rig(max_batch_bytes=9)
    rig.put("a", 2)
    assert rig.take() == ["a0", "a1"]


def test_end_of_a_stream_that_has_nothing_queued() -> None:
    rig = Rig()
    rig.put("a", 1)
    rig.queue.put_end("b", rig.job("b is done"))
    assert rig.take() == ["b is done", "a0"]


def test_calls_come_before_writes_in_their_own_order() -> None:
    rig = Rig()
    rig.put("a", 1)
    rig.queue.call(rig.job("first"))
    rig.queue.call(rig.job("second"))
    assert rig.take(blocked="a") == ["first", "second"]
    assert rig.take() == ["a0"]


def test_stream_that_is_not_ready_keeps_nobody_back() -> None:
    rig = Rig()
    rig.put("a", 2)
    rig.put("b", 2)
    rig.queue.put_end("a", rig.job("a is done"))
    assert rig.take(blocked="a") == ["b0", "b1"]
    assert rig.take() == ["a0", "a1", "a is done"]


def test_end_does_not_wait_for_room_that_it_does_not_need() -> None:
    rig = Rig()
    rig.queue.put_end("a", rig.job("a is done"))
    rig.put("b", 1)
    rig.queue.put_end("b", rig.job("b is done"))
    assert rig.take(blocked="ab") == ["a is done"]
    assert rig.take() == ["b0", "b is done"]


def test_full_stream_makes_room_by_what_is_taken_and_keeps_nobody_else_back() -> None:
    rig = Rig(max_puts=2)
    rig.put("a", 2)
    assert not rig.queue.put("a", [("a2", 10)], 0.01)
    rig.put("b", 1)
    rig.queue.put_end("a", rig.job("a is done"))  # no write, and so never held up
    waiting = threading.Thread(target=lambda: rig.queue.put("a", [("a2", 10)], 10))
    waiting.start()
    assert rig.take(1) == ["a0"]
    waiting.join(5)
    assert not waiting.is_alive()
    assert rig.take() == ["a1", "a is done", "a2", "b0"]


def test_batch_makes_room_for_as_many_as_it_has() -> None:
    rig = Rig(max_puts=3, max_batch_bytes=20)
    rig.put("a", 3)
    assert rig.take(1) == ["a0+a1"]
    rig.put("a", 2, first=3)
    assert not rig.queue.put("a", [("a5", 10)], 0)
    assert rig.take() == ["a2+a3", "a4"]
    assert len(rig.queue) == 0


def test_what_is_put_together_counts_once_until_its_last_part_is_taken() -> None:
    rig = Rig(max_puts=2)
    assert rig.queue.put("a", [(f"a{index}", math.inf) for index in range(5)], 0)
    assert rig.queue.put("a", [("a5", 10)], 0)
    assert len(rig.queue) == 2
    assert rig.take(4) == ["a0", "a1", "a2", "a3"]
    assert not rig.queue.put("a", [("a6", 10)], 0)
    rig.put("b", 1)
    assert rig.take(2) == ["a4", "b0"]
    assert rig.queue.put("a", [("a6", 10)], 0)
    assert rig.queue.put("c", [], 0)
    assert rig.take() == ["a5", "a6"]
    assert len(rig.queue) == 0


def test_who_waits_for_a_job_is_woken() -> None:
    rig, found = Rig(), list[object]()
    waiting = threading.Thread(target=lambda: found.append(rig.queue.get(lambda _: True, 10)))
    waiting.start()
    rig.put("a", 1)
    waiting.join(5)
    assert len(found) == 1
    assert found[0] is not None
