"""Both ends of the hand-over against everything a network, a transport, clocks and restarts may do to them.

What `tests.kvtransfer.unreliable` makes up obeys the rules below; what is checked is true after every one of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.errors import CorruptBlocks
from kvtransfer.geometry import CacheSpan
from kvtransfer.peer import PeerOptions
from kvtransfer.sender import Sender
from kvtransfer.ticket import HandoverTarget, ReceivedSequence, SenderIdentity
from model.block_pool import BlockPool
from protos.errors import ServiceError
from tests.kvtransfer.cache import LAYOUT, hashes_of
from tests.kvtransfer.unreliable import (
    KINDS,
    LEASE_S,
    NOTICE_S,
    Agent,
    Attempt,
    Channel,
    Decode,
    Memories,
    Memory,
    Network,
    Stream,
    Sums,
    Transport,
    content,
    parts,
)
from tests.kvtransfer.virtual_loop import VirtualLoop

BLOCK = LAYOUT.block_size
NUM_BLOCKS = 10
LAYERS = range(LAYOUT.num_layers)
PEER = PeerOptions(
    heartbeat_s=1.0, silence_s=15.0, call_timeout_s=8.0, release_backoff_s=0.5, max_release_backoff_s=1.0, told_bytes=1
)
SENDER_CLOCK, RECEIVER_AHEAD_S = 5_000.0, 3 * 3600.0
WEATHERS = [frozenset[str]()] * 4 + [frozenset([kind]) for kind in KINDS] + [frozenset(["Attach", "Release"])]
some = st.integers(0, 7)
T = TypeVar("T")


class Prefill:
    """One process start of the prefill worker."""

    def __init__(self, number: int, world: UnreliableNetwork) -> None:
        self.memory: Memory = {}
        self.pool = BlockPool(NUM_BLOCKS)
        self.span = CacheSpan(LAYOUT, 1 << 20, NUM_BLOCKS)
        self.channels: list[Channel] = []
        self.attempts: list[Attempt] = []
        self.identity = SenderIdentity("prefill-0", f"s{number}")
        agent = Agent(world.memories, self.memory)
        self.transport: Transport = Transport(world.memories, self.memory, world.loop)
        with mock.patch("kvtransfer.sender.TransferThread", lambda *_, **__: self.transport):
            sums = Sums(self.memory, self.span)
            self.sender = Sender(agent, self.pool, self.span, self.identity, sums=sums, peer_options=PEER)  # type: ignore[arg-type]


class UnreliableNetwork(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop(SENDER_CLOCK)
        self.network, self.memories = Network(self.loop), Memories(self.loop)
        self.decodes: list[Decode] = []
        self.prefills: list[Prefill] = []
        self.attempts: list[Attempt] = []
        self.running: dict[str, tuple[Decode, Attempt, ReceivedSequence]] = {}  # what decodes, by attempt
        patched = mock.patch("kvtransfer.sender.open_channel", self.open_channel)
        patched.start()
        self.unpatch = patched.stop
        self.defects: list[str] = []
        self.loop.set_exception_handler(self.note)
        self.start_decode()
        self.start_prefill()

    def note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")  # none: a task of a killed sender that is forgotten while it waits
        if error is not None and not isinstance(error, ServiceError):
            self.defects.append(str(context))

    @property
    def decode(self) -> Decode:
        return self.decodes[-1]

    @property
    def prefill(self) -> Prefill:
        return self.prefills[-1]

    def open_channel(self, address: str) -> Channel:
        channel = Channel(self.network, lambda: self.decode)
        self.prefill.channels.append(channel)
        return channel

    def start_decode(self) -> None:
        self.decodes.append(Decode(len(self.decodes), NUM_BLOCKS, self.network, self.memories, RECEIVER_AHEAD_S))

    def start_prefill(self) -> None:
        self.prefills.append(self.loop.run_until_complete(self._prefill()))

    async def _prefill(self) -> Prefill:
        return Prefill(len(self.prefills), self)

    # The work

    @rule(
        prompt=st.sampled_from([0, 1000]),
        num_tokens=st.integers(1, 4 * BLOCK),
        num_layers=st.integers(0, len(LAYERS)),
        commits=st.booleans(),
        answer=st.sampled_from(["comes"] * 5 + ["late", "never"]),
    )
    def start(self, prompt: int, num_tokens: int, num_layers: int, commits: bool, answer: str) -> None:
        """A prompt is computed, room is asked for where the router says, and some layers are written."""
        self.pass_time(0.5)
        num_blocks = LAYOUT.num_blocks(num_tokens)
        if self.prefill.pool.num_free < num_blocks:
            return
        attempt = Attempt(f"a{len(self.attempts)}", prompt, num_tokens)
        attempt.local_ids = self.prefill.pool.allocate(num_blocks)
        for index, block_id in enumerate(attempt.local_ids):
            for layer in LAYERS:
                address = self.prefill.span.address(layer, block_id)
                self.prefill.memory[address] = content(prompt, num_tokens, index, layer)
        self.attempts.append(attempt)
        self.prefill.attempts.append(attempt)
        held_kinds = self.network.held_kinds
        if answer != "comes":
            self.network.held_kinds = held_kinds | {"Reserve answer"}
        attempt.reserving = self.loop.create_task(self._reserve(self.prefill, attempt))
        self.loop.settle()
        self.network.held_kinds = held_kinds
        if answer == "never":
            self.network.letters = [one for one in self.network.letters if one.kind != "Reserve answer"]
        if attempt.is_open and commits:
            self._commit(attempt, len(LAYERS))
        elif attempt.is_open:
            self._write(attempt, num_layers)
        self.let_go_of_ended()

    async def _reserve(self, prefill: Prefill, attempt: Attempt) -> Any:
        outgoing = await prefill.sender.reserve(
            HandoverTarget("decode-0", "address", self.decode.epoch),
            attempt_id=attempt.attempt_id,
            request_id="r",
            num_tokens=attempt.num_tokens,
            block_hashes=hashes_of(attempt.num_tokens, attempt.prompt),
            timeout_s=PEER.call_timeout_s,
        )
        outgoing.hold(attempt.local_ids)
        return outgoing

    def _write(self, attempt: Attempt, num_layers: int) -> None:
        """Up to so many layers in all."""
        for layer in range(attempt.num_written_layers, num_layers):
            attempt.outgoing.write(layer, 0, attempt.local_ids)
            attempt.num_written_layers = layer + 1
        self.loop.settle()

    @rule(number=some, num_layers=st.sampled_from([3, 3, 3, 2]))
    def commit(self, number: int, num_layers: int) -> None:
        for attempt in self.chosen([one for one in self.prefill.attempts if one.is_open], number):
            self._commit(attempt, num_layers)

    def _commit(self, attempt: Attempt, num_layers: int) -> None:
        self._write(attempt, num_layers)
        attempt.ending = self.loop.create_task(attempt.outgoing.commit(7, attempt.num_tokens))
        self.loop.settle()
        self.let_go_of_ended()

    @rule(number=some, who=st.sampled_from(["nobody", "nobody", "prefill", "router"]))
    def give_up(self, number: int, who: str) -> None:
        """The prefill worker, be its record under way or not; or the router, which ends its stream for the attempt."""
        if who == "prefill":
            for attempt in self.chosen([one for one in self.prefill.attempts if one.outgoing is not None], number):
                self._abort(attempt)
        elif who == "router":
            for attempt in self.chosen(
                [one for one in self.attempts[-8:] if one.attempt_id not in self.running], number
            ):
                self.decode.given_up.add(attempt.attempt_id)
                self.decode.receiver.abort(attempt.attempt_id, "the router's stream ended")

    def _abort(self, attempt: Attempt) -> None:
        aborting = self.loop.create_task(attempt.outgoing.abort("given up"))
        attempt.ending = attempt.ending or aborting
        self.loop.settle()
        self.let_go_of_ended()

    @rule(number=some, evict=st.booleans())
    def finish(self, number: int, evict: bool) -> None:
        """A sequence has been decoded to its end. Others then take every free block, write into it, and end, too."""
        for attempt_id in self.chosen(sorted(self.running), number):
            decode, _, received = self.running.pop(attempt_id)
            decode.pool.release(received.block_ids)
        if evict:
            blocks = self.decode.pool.allocate(self.decode.pool.num_free)
            for block_id in blocks:
                for layer in LAYERS:
                    self.memories.contents[self.decode.span.address(layer, block_id)] = "another sequence's"
            self.decode.pool.release(blocks)

    # What may go wrong

    @rule(kinds=st.sampled_from(WEATHERS))
    def hold_back(self, kinds: frozenset[str]) -> None:
        """These messages wait from now on, until they are delivered or others overtake them."""
        self.network.held_kinds = kinds

    @rule(number=some, fate=st.sampled_from(["deliver", "deliver", "lose", "duplicate"]))
    def letter(self, number: int, fate: str) -> None:
        letters = [one for one in self.network.letters if fate == "deliver" or one.may_be_lost]
        for letter in self.chosen(letters, number):
            if fate == "deliver":
                self.network.deliver(letter)
            elif fate == "lose":
                self.network.letters.remove(letter)
            else:
                letter.deliver()
            self.loop.settle()

    @rule(kind=st.sampled_from(["nothing"] * 4 + ["Attach", "Attach", "Attach answer"]), in_the_end=st.booleans())
    def cut_off(self, kind: str, in_the_end: bool) -> None:
        """For longer than a lease lasts; then what was under way may arrive."""
        if kind == "nothing":
            return
        self.network.held_kinds |= {kind}
        self.pass_time(LEASE_S + 1.0)
        if in_the_end:
            self.network.held_kinds -= {kind}
            for letter in [one for one in self.network.letters if one.kind == kind]:
                self.network.deliver(letter)
            self.loop.settle()

    @rule(are_slow=st.booleans())
    def slow_writes(self, are_slow: bool) -> None:
        self.memories.are_slow = are_slow

    @rule(number=some, fate=st.sampled_from(["lands", "lands", "lands wrong", "fails"]))
    def end_write(self, number: int, fate: str) -> None:
        """One that failed may have landed all the same, or may do so yet."""
        for write in self.chosen(self.memories.writes, number):
            if fate == "fails":
                self.memories.fail(write)
            else:
                self.memories.land(write, wrong=fate == "lands wrong")
            self.loop.settle()

    @rule(
        number=some,
        what=st.sampled_from(["nothing"] * 4 + ["stream", "stream", "decode", "prefill"]),
        late=st.booleans(),
    )
    def break_down(self, number: int, what: str, late: bool) -> None:
        """Seldom, or little would come of anything else; and best while something is being written."""
        if what != "nothing" and late:
            self.memories.are_slow = True
            for attempt in [one for one in self.prefill.attempts if one.is_open]:
                self._write(attempt, len(LAYERS))
        if what == "prefill":
            self.restart_prefill()
        elif what == "decode":
            self.restart_decode()
        elif what == "stream":
            for stream in self.chosen(self.streams(self.prefill), number):
                stream.sever(NOTICE_S if late else 0.0)
        self.loop.settle()

    def streams(self, prefill: Prefill) -> list[Stream]:
        return [stream for channel in prefill.channels for stream in channel.streams if not stream.broken]

    def restart_decode(self) -> None:
        for stream in self.streams(self.prefill):
            stream.sever(0.0)
        self.running = {}
        self.start_decode()

    def restart_prefill(self) -> None:
        """Killed: it says nothing more to anybody, and its connections are found broken."""
        self.prefill.transport.die()
        for channel in self.prefill.channels:
            channel.is_dead = True
        for stream in self.streams(self.prefill):
            stream.sever(NOTICE_S)
        self.start_prefill()

    @rule(seconds=st.sampled_from([0.5, 0.5, 1.0, 1.0, 2.0, LEASE_S + 1.0]))
    def pass_time(self, seconds: float) -> None:
        self.loop.advance(seconds, self.after_each_step)

    def after_each_step(self) -> None:
        self.memories.pass_time()
        for decode in self.decodes:
            decode.receiver.expire()
        self.take_over()
        self.let_go_of_ended()
        self.no_block_is_reused_under_a_possible_write()

    # What is checked

    def take_over(self) -> None:
        """The router's streams get what has been committed for them, or the blocks go back."""
        by_id = {attempt.attempt_id: attempt for attempt in self.attempts}
        for attempt_id, received in list(self.decode.committed.items()):
            del self.decode.committed[attempt_id]
            self.running[attempt_id] = self.decode, by_id[attempt_id], received

    def let_go_of_ended(self) -> None:
        """A request ends on the prefill worker, and its own hold on the local blocks with it."""
        for attempt in [*self.prefill.attempts]:
            reserved, ending = attempt.reserving, attempt.ending
            if ending is None and (reserved is None or not reserved.done() or attempt.outgoing is not None):
                continue
            if ending is None or ending.done():
                for task in (reserved, ending):
                    error = task.exception() if task is not None and not task.cancelled() else None
                    assert isinstance(error, ServiceError | None), repr(error)
                    if isinstance(error, CorruptBlocks):
                        assert self.memories.in_doubt, f"nothing went wrong with a write, and yet: {error}"
                self.prefill.attempts.remove(attempt)
                self.prefill.pool.release(attempt.local_ids)

    def possible_writes(self) -> set[int]:
        """Blocks of the decode worker that somebody may write yet: what moves, and what may still be posted."""
        blocks = set()
        for write in self.memories.writes:
            for address, _ in parts(write.regions):
                blocks |= self.decode.block_at(address)
        for attempt in self.prefill.attempts:
            ticket = self.decode.granted.get(attempt.attempt_id)
            if ticket is not None and attempt.is_open and attempt.outgoing.failed is None:
                blocks |= set(ticket.block_ids)
                generations = map(self.decode.pool.generation, ticket.block_ids)
                assert [*generations] == [*ticket.generations], "allocated again while its sender may post"
        return blocks

    @invariant()
    def no_block_is_reused_under_a_possible_write(self) -> None:
        self.take_over()
        pool = self.decode.pool
        pool.check_integrity()
        blocks = self.possible_writes()
        for block_id in blocks:
            assert pool.is_held(block_id), "free under a possible write"
        for _, _, received in self.running.values():
            assert not blocks & set(received.block_ids), "decoded from under a possible write"

    @invariant()
    def what_decodes_is_what_was_computed(self) -> None:
        for decode, attempt, received in self.running.values():
            for index, block_id in enumerate(received.block_ids):
                for layer in LAYERS:
                    found = self.memories.contents.get(decode.span.address(layer, block_id))
                    assert found == content(attempt.prompt, attempt.num_tokens, index, layer), attempt.attempt_id

    @invariant()
    def attempts_end_once(self) -> None:
        for decode in self.decodes:
            ends = Counter([*decode.told, *decode.accepted])
            assert not ends or max(ends.values()) == 1, ends
        assert not self.defects, self.defects

    def teardown(self) -> None:
        self.network.held_kinds, self.memories.are_slow = frozenset(), False
        for letter in [*self.network.letters]:
            self.network.deliver(letter)
            self.loop.settle()
        for write in [*self.memories.writes]:
            self.memories.land(write)
        for attempt in [*self.prefill.attempts]:
            if attempt.outgoing is not None:
                self._abort(attempt)
        self.pass_time(20.0)
        self.everything_has_ended()
        closing = self.loop.do(self.prefill.sender.close())
        self.loop.advance(5.0, self.after_each_step)
        assert closing.done() and closing.exception() is None
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.settle()
        self.loop.close()
        self.unpatch()

    def everything_has_ended(self) -> None:
        self.attempts_end_once()
        for attempt in [*self.prefill.attempts]:
            assert attempt.ending is not None or attempt.outgoing is None, "an attempt is still under way"
        decode = self.decode
        unended = decode.granted.keys() - {*decode.told, *decode.accepted, *decode.given_up}
        assert not unended, "the router waits for ever"
        for _, _, received in self.running.values():
            decode.pool.release(received.block_ids)
        assert decode.pool.num_used == 0, "blocks were left behind on the decode worker"
        assert decode.receiver.num_reserved_blocks == decode.receiver.num_quarantined_blocks == 0
        for attempt in self.prefill.attempts:
            self.prefill.pool.release(attempt.local_ids)
        assert self.prefill.pool.num_used == 0, "blocks were left behind on the prefill worker"

    @staticmethod
    def chosen(things: Sequence[T], number: int) -> list[T]:
        """One, if there are any."""
        return [things[number % len(things)]] if things else []


UnreliableNetwork.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestUnreliableNetwork = UnreliableNetwork.TestCase
