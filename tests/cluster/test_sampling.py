"""Seeded sampling: the same seed gives the same text wherever and however often the request runs."""

from __future__ import annotations

import asyncio
import os
import signal

from deploy.local import ClusterConfig, LocalCluster
from protos.client import PdserveClient
from protos.values import Sampling
from tests.cluster.asking import Answered, ask
from tests.cluster.tiny_model import TinyModel

PROMPT = "Once upon a time"
SAMPLING = Sampling(
    temperature=0.9,
    top_p=0.95,
    seed=11,
    max_tokens=600,
    ignore_eos=True,
    presence_penalty=0.3,
    repetition_penalty=1.05,
    stop=["\ufffd" * 40 + "never"],  # seen half all the time: bytes at random are no characters, mostly
)


def config(tiny_moe: TinyModel, num_prefill: int, num_decode: int, num_colocated: int = 0) -> ClusterConfig:
    return ClusterConfig(
        model=str(tiny_moe.folder),
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_colocated=num_colocated,
        num_threads=1,
        worker_arguments=("--dtype", "float32", "--num-blocks", "400"),
    )


async def test_same_text_disaggregated_colocated_and_resumed(tiny_moe: TinyModel) -> None:
    async with LocalCluster(config(tiny_moe, 0, 0, 1)) as cluster, PdserveClient(cluster.router_address) as client:
        colocated = await ask(client, PROMPT, SAMPLING)
        other_seed = await ask(client, PROMPT, Sampling(temperature=0.9, seed=12, max_tokens=20, ignore_eos=True))
    assert not colocated.usage.disaggregated
    assert colocated.usage.decode_computed_tokens == colocated.usage.prompt_tokens
    assert other_seed.token_ids != colocated.token_ids[:20]
    async with LocalCluster(config(tiny_moe, 1, 2)) as cluster, PdserveClient(cluster.router_address) as client:
        disaggregated = await ask(client, PROMPT, SAMPLING)
        resumed = await resume_by_force(cluster, client)
    assert disaggregated.usage.disaggregated
    assert disaggregated.token_ids == colocated.token_ids
    assert resumed.token_ids == colocated.token_ids
    assert resumed.text == colocated.text


async def resume_by_force(cluster: LocalCluster, client: PdserveClient) -> Answered:
    """Kills the decode worker mid-answer. While the answer begins there is no other; then there is one to resume on."""
    await client.set_role("decode-1", "prefill")

    async def kill() -> None:
        os.kill(cluster.pid("decode-0"), signal.SIGSTOP)  # it must not come to the answer's end meanwhile
        await client.set_role("decode-1", "decode")
        await cluster.kill("decode-0")

    answered = await ask(client, PROMPT, SAMPLING, at_token=50, then=kill)
    assert answered.usage.num_resumes == 1
    return answered


async def test_preempted_sequences_resume_exactly(tiny_moe: TinyModel) -> None:
    """More sequences than the decode worker's blocks hold: some drop their KV, are computed again, and go on."""
    cluster_config = ClusterConfig(
        model=str(tiny_moe.folder),
        num_threads=1,
        worker_arguments=("--dtype", "float32", "--num-blocks", "100"),
    )
    prompts = [[3 + (index * 7 + i * i) % 300 for i in range(40)] for index in range(12)]
    async with LocalCluster(cluster_config) as cluster, PdserveClient(cluster.router_address) as client:
        sampling = Sampling(temperature=0, max_tokens=260, ignore_eos=True)
        answers = await asyncio.gather(*(ask(client, prompt, sampling) for prompt in prompts))
    assert sum(answered.usage.num_preemptions for answered in answers) > 0
    assert sum(answered.usage.decode_recomputed_tokens for answered in answers) > 0
    for prompt, answered in zip(prompts, answers, strict=True):
        assert len(answered.token_ids) == 260
        tiny_moe.assert_greedy(prompt, answered.token_ids)
