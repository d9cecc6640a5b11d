"""KV in eight bits through the whole system: a decode worker holds what was computed, coded once, bit for bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.request import urlopen

import grpc.aio
import pytest
import pytest_asyncio
import torch
from torch import Tensor

from deploy.local import ClusterConfig, LocalCluster
from deploy.process import ProcessEnded
from deploy.runners import load_runner
from kvtransfer.coding import block_bytes
from kvtransfer.nixl_agent import NixlAgent
from model.kv_layout import KVLayout
from protos import decode_pb2, decode_pb2_grpc, inference_pb2, prefill_pb2, prefill_pb2_grpc
from protos.channel import open_channel
from protos.client import PdserveClient
from protos.values import Sampling
from tests.cluster.asking import ask, assert_at_rest
from tests.cluster.draft_heads import write_head
from tests.cluster.tiny_model import VOCAB_SIZE, TinyModel
from tests.deploy.test_runners import config
from tests.kvtransfer.cache import Cache
from tests.kvtransfer.wire import arriving, memory_of
from tests.kvtransfer.workers import DecodeSide

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_LAYERS = 3  # of the tiny model itself
NUM_PROMPT_TOKENS = 16 * 5 + 7
NUM_ANSWERED = 500  # tokens: long enough to be still there when a worker is emptied
SAMPLING = inference_pb2.SamplingParams(
    temperature=0, top_p=1, repetition_penalty=1, max_tokens=700, ignore_eos=True, max_draft_tokens=0
)


@dataclass(frozen=True)
class Wire:
    cluster: LocalCluster
    coding: str
    layout: KVLayout

    async def received_bytes(self, name: str, coding: str) -> float:
        address = (await self.cluster.workers())[name].metrics_address

        def read() -> str:
            with urlopen(f"http://{address}/metrics", timeout=5) as response:
                return str(response.read(), "utf-8")

        series = f'pdserve_kvtransfer_received_bytes_total{{coding="{coding}"}} '
        lines = (await asyncio.to_thread(read)).splitlines()
        return next((float(line[len(series) :]) for line in lines if line.startswith(series)), 0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["int8-bfloat16", "fp8-float32-eagle"])
async def wire(
    request: pytest.FixtureRequest, tiny_moe: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Wire]:
    """With a drafter that keeps KV of its own, too: further layers."""
    coding, dtype, *drafter = request.param.split("-")
    settings = {"dtype": dtype, "num_blocks": "200", "max_step_tokens": "256", "drafter": "ngram"}
    if drafter:
        head = write_head(tmp_path_factory.mktemp("head"), "eagle", tiny_moe.folder)
        settings |= {"drafter": "eagle", "draft_model": str(head)}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    cluster_config = ClusterConfig(
        model=str(tiny_moe.folder),
        num_decode=2,
        num_threads=1,
        worker_arguments=(*arguments, f"--wire-kv={coding}", "--verify-kv=all"),
    )
    layout = load_runner(config(tiny_moe.folder, **settings), tiny_moe.folder).layout
    assert layout.num_layers == NUM_LAYERS + bool(drafter)
    async with LocalCluster(cluster_config) as cluster:
        yield Wire(cluster, coding, layout)
        for name in cluster.config.worker_roles:
            assert "Traceback" not in cluster.log_path(name).read_text()


@asynccontextmanager
async def exact_side(layout: KVLayout, name: str) -> AsyncIterator[DecodeSide]:
    """A decode worker that takes KV as it is alone, and shows it."""
    cache = Cache(layout, 100, fill=0)
    side = DecodeSide(NixlAgent(name, cache.address, cache.num_bytes), cache, layout=layout)
    await side.start()
    try:
        yield side
    finally:
        await side.stop()


def target_of(side: DecodeSide, name: str) -> decode_pb2.DecodeTarget:
    return decode_pb2.DecodeTarget(worker_id=name, address=side.target.address, epoch=side.epoch)


def kv_of(side: DecodeSide, attempt_id: str) -> Tensor:
    """Of the prompt's blocks [L, blocks, H, V, B, D]."""
    received = side.committed[attempt_id]
    num_blocks = side.layout.num_blocks(NUM_PROMPT_TOKENS)
    return memory_of(side.cache, side.layout)[:, list(received.block_ids[:num_blocks])].clone()


async def prefill(address: str, attempt_id: str, prompt: list[int], target: decode_pb2.DecodeTarget) -> None:
    request = prefill_pb2.PrefillRequest(
        request_id=attempt_id,
        attempt_id=attempt_id,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SAMPLING,
        decode=target,
    )
    async with open_channel(address) as channel:
        events = [
            response.WhichOneof("event") async for response in prefill_pb2_grpc.PrefillStub(channel).Prefill(request)
        ]
    assert events == ["first_token", "handed_over"]


async def test_decode_worker_holds_what_was_computed_coded_once(wire: Wire) -> None:
    """What the prefill worker computed is read by a hand-over as it is; what the decode worker holds, by another."""
    rng = random.Random(1)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(NUM_PROMPT_TOKENS)]
    workers = await wire.cluster.workers()
    address, decode = workers["prefill-0"].address, workers["decode-0"]
    before = await wire.received_bytes("decode-0", wire.coding)
    async with exact_side(wire.layout, "exact") as exact, exact_side(wire.layout, "moved") as moved:
        await prefill(address, "warm", prompt, target_of(exact, "exact"))
        await prefill(address, "again", prompt, target_of(exact, "exact"))  # its last block is computed as below
        assert exact.committed["again"].num_cached_tokens == 80
        async with open_channel(decode.address) as channel:
            stub = decode_pb2_grpc.DecodeStub(channel)
            asked = decode_pb2.DecodeRequest(
                request_id="r", attempt_id="a", token_ids=prompt, num_prompt_tokens=len(prompt), sampling=SAMPLING
            )
            stream = stub.Decode(asked)
            there = decode_pb2.DecodeTarget(worker_id="decode-0", address=decode.address, epoch=decode.epoch)
            await prefill(address, "a", prompt, there)
            assert await stream.read() is not grpc.aio.EOF
            departure = await stub.HandOver(
                decode_pb2.HandOverRequest(
                    request_id="r", attempt_id="a", next_attempt_id="b", target=target_of(moved, "moved")
                )
            )
            while await stream.read() is not grpc.aio.EOF:
                pass
        assert departure.sent_bytes == len(moved.committed["b"].block_ids) * wire.layout.block_bytes  # as they are
        computed, held = kv_of(exact, "again"), kv_of(moved, "b")
    expected = arriving(computed, NUM_PROMPT_TOKENS, wire.coding)
    assert torch.equal(held[:, :5], expected[:, :5])
    last = expected[:NUM_LAYERS, 5, :, :, :7]  # the drafter's layers go on from the prompt's last token
    assert torch.equal(held[:NUM_LAYERS, 5, :, :, :7], last)
    assert not torch.equal(held[:, :5], computed[:, :5])
    num_bytes = 6 * block_bytes(wire.layout, wire.coding)
    assert await wire.received_bytes("decode-0", wire.coding) - before == num_bytes
    await assert_at_rest(wire.cluster)


async def test_answers_come_and_running_sequences_move(wire: Wire) -> None:
    """From one decode worker to the other, in eight bits as well."""
    rng = random.Random(2)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 16, 33, 150, 250)]
    sampling = Sampling(temperature=0, max_tokens=NUM_ANSWERED, ignore_eos=True)
    before = {name: await wire.received_bytes(name, wire.coding) for name in ("decode-0", "decode-1")}
    async with PdserveClient(wire.cluster.router_address) as client:
        moving: list[asyncio.Task[None]] = []

        async def drain() -> None:
            moving.append(asyncio.create_task(client.set_draining("decode-0", True)))

        answers = await asyncio.gather(
            *(
                ask(client, prompt, sampling, at_token=20, then=drain if not i else None)
                for i, prompt in enumerate(prompts)
            )
        )
        await asyncio.gather(*moving)
        await client.set_draining("decode-0", False)
    assert [len(answered.token_ids) for answered in answers] == [NUM_ANSWERED] * 5
    assert sum(answered.usage.num_moves for answered in answers) >= 1
    for answered, prompt in zip(answers, prompts, strict=True):
        assert answered.usage.decode_recomputed_tokens == answered.usage.num_retries == 0
        assert answered.usage.decode_received_tokens + answered.usage.decode_cached_tokens == len(prompt)
    for name in before:
        assert await wire.received_bytes(name, wire.coding) > before[name]
        assert await wire.received_bytes(name, "as-is") == 0
    await assert_at_rest(wire.cluster)


async def test_timed_workers_do_not_start_with_it(tiny_moe: TinyModel) -> None:
    arguments = ("--runner", "timed", "--num-blocks", "100", "--wire-kv", "int8")
    cluster = LocalCluster(ClusterConfig(model=str(tiny_moe.folder), num_threads=1, worker_arguments=arguments))
    with pytest.raises(ProcessEnded, match="--wire-kv int8 needs --runner torch"):
        await cluster.start()
