"""Looking inside a running cluster: a request's stages, the traffic, and what each worker tells of itself.

The model and its drafts are real; each decode step drafts the same number, so that nothing depends on the machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from functools import partial

import grpc
import pytest
import pytest_asyncio

from deploy.local import ClusterConfig, LocalCluster
from protos import insights_pb2, insights_pb2_grpc
from protos.client import PdserveClient
from protos.errors import NotFound
from protos.insight_values import RequestSummary
from protos.secret import ClusterSecret
from protos.values import Sampling
from tests.cluster.asking import ask, assert_at_rest
from tests.cluster.tiny_model import VOCAB_SIZE, TinyModel

NUM_DRAFTS = 3
NUM_EXPERTS_PER_TOKEN, NUM_LAYERS = 2, 3
DEADLINE_S = 20.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_moe: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    secret = tmp_path_factory.mktemp("insights") / "secret"
    secret.write_text(hashlib.sha256(b"insights").hexdigest())
    shared = ("--cluster-secret-file", str(secret))
    config = ClusterConfig(
        model=str(tiny_moe.folder),
        num_threads=1,
        router_arguments=shared,
        worker_arguments=(
            *("--dtype", "float32", "--num-blocks", "200", "--drafter", "ngram", *shared),
            *("--draft-length", "fixed", "--max-draft-tokens", str(NUM_DRAFTS)),
        ),
        connect=partial(PdserveClient, secret=ClusterSecret(secret)),
    )
    async with LocalCluster(config) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[PdserveClient]:
    async with cluster.config.connect(cluster.router_address) as client:
        yield client


async def seen(client: PdserveClient, request_id: str) -> RequestSummary | None:
    for each in await client.list_requests(deadline_s=DEADLINE_S):
        if each.request_id == request_id:
            return each
    return None


async def test_a_request_can_be_followed_and_is_kept(cluster: LocalCluster, client: PdserveClient) -> None:
    prompt = [random.Random(1).randrange(3, VOCAB_SIZE) for _ in range(70)]
    sampling = Sampling(temperature=0, max_tokens=150, ignore_eos=True, max_draft_tokens=0)
    states: list[str] = []
    async for _ in client.generate(prompt, sampling=sampling, request_id="followed", deadline_s=90):
        if not states:
            while (now := await seen(client, "followed")) is not None and now.state != "done":
                states.append(now.state)
                if now.state == "decode" and now.num_output_tokens > 3:
                    assert now.timeline.stages[-1].name == "decode"
                    assert (now.prefill_worker, now.decode_worker) == ("prefill-0", "decode-0")
                    break
    told = await seen(client, "followed")
    assert told is not None
    assert set(states) <= {"prefill", "decode"}
    assert (told.state, told.num_prompt_tokens, told.num_output_tokens) == ("done", 70, 150)
    assert [stage.name for stage in told.timeline.stages] == ["tokenize", "queue", "prefill", "handover", "decode"]
    ends = [stage.start_s + stage.duration_s for stage in told.timeline.stages]
    assert ends == sorted(ends) and ends[-1] <= told.timeline.total_s
    traffic = await client.get_traffic(3600, deadline_s=DEADLINE_S)
    assert traffic.ttft_s.p99 == pytest.approx(told.timeline.ttft_s, rel=0.0101)
    assert traffic.tpot_s.p50 == pytest.approx(told.timeline.tpot_s, rel=0.0101)
    counted = (traffic.prompt_tokens_per_s * traffic.window_s, traffic.output_tokens_per_s * traffic.window_s)
    assert counted == pytest.approx((70, 150), rel=1e-6)


async def test_workers_tell_of_drafts_experts_and_hand_overs(cluster: LocalCluster, client: PdserveClient) -> None:
    before = {name: await client.get_worker_insights(name, deadline_s=DEADLINE_S) for name in ("prefill-0", "decode-0")}
    rng = random.Random(2)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(50)] for _ in range(6)]
    sampling = Sampling(temperature=0, max_tokens=60, regex="(abcd){40}")  # which look-up finds soon
    answers = await asyncio.gather(*(ask(client, prompt, sampling) for prompt in prompts))
    await assert_at_rest(cluster)
    prefill = await client.get_worker_insights("prefill-0", deadline_s=DEADLINE_S)
    decode = await client.get_worker_insights("decode-0", deadline_s=DEADLINE_S)

    (drafts,), (drafts_before,) = decode.drafts, before["decode-0"].drafts
    usages = [answered.usage for answered in answers]
    assert (drafts.source, decode.draft_reason) == ("ngram", "fixed")
    drafted, accepted = sum(each.drafted_tokens for each in usages), sum(each.accepted_tokens for each in usages)
    assert drafts.drafted_tokens - drafts_before.drafted_tokens == drafted > 0
    assert drafts.accepted_tokens - drafts_before.accepted_tokens >= accepted > 0  # an answer may end within a draft
    assert len(drafts.acceptance) == NUM_DRAFTS and all(0.0 <= chance <= 1.0 for chance in drafts.acceptance)
    assert sum(drafts.lengths) - sum(drafts_before.lengths) == sum(each.num_steps for each in usages)
    assert sum(length * count for length, count in enumerate(drafts.lengths)) == drafts.drafted_tokens
    assert 1.0 <= drafts.tokens_per_step <= 1 + NUM_DRAFTS

    for worker in (prefill, decode):
        assert [load.layer for load in worker.experts] == list(range(len(worker.experts)))
        assert len(worker.experts) == NUM_LAYERS
        for load in worker.experts:
            assert sum(load.shares) == pytest.approx(1.0, abs=1e-5)
            assert max(load.shares) <= 1 / NUM_EXPERTS_PER_TOKEN + 1e-6  # a token chooses two different ones
            assert load.imbalance == pytest.approx(max(load.shares) * len(load.shares), rel=1e-5)

    sent, taken = prefill.transfers, decode.transfers
    assert sent.num_handovers - before["prefill-0"].transfers.num_handovers == len(answers)
    assert sent.sent_bytes_per_s > 0.0 < taken.received_bytes_per_s
    assert sent.sent_bytes_per_s == pytest.approx(taken.received_bytes_per_s, rel=0.5)  # asked one after the other
    assert 0.0 < sent.exposed_p50_s <= sent.exposed_p90_s
    assert (taken.num_leases, taken.num_quarantined_blocks, taken.oldest_quarantine_s) == (0, 0, 0.0)
    assert (taken.num_expired_leases, taken.num_rejected, sent.num_failed_writes) == (0, 0, 0)
    assert (prefill.worker_id, decode.worker_id) == ("prefill-0", "decode-0")
    assert decode.uptime_s > before["decode-0"].uptime_s > 0.0


async def test_a_worker_that_is_not_there_and_a_caller_who_is_no_router(
    cluster: LocalCluster, client: PdserveClient
) -> None:
    with pytest.raises(NotFound, match="no worker 'decode-9' is registered"):
        await client.get_worker_insights("decode-9", deadline_s=DEADLINE_S)
    address = (await cluster.workers())["decode-0"].address
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await insights_pb2_grpc.InsideStub(channel).GetInsights(insights_pb2.GetInsightsRequest(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
