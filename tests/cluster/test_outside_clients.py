"""Clients that are not ours, through the whole system; and those that stop reading, vanish, or hold a dead link."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from deploy.local import LocalCluster
from protos import inference_pb2 as pb
from protos.client import PdserveClient
from protos.values import Chunk, Sampling
from tests.cluster.asking import assert_at_rest
from tests.cluster.timed_cluster import ask_all, expected, prompts, timed_config
from tests.cluster.tiny_model import TinyModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCRIPT = Path(__file__).parent / "outside_client.py"
UNREAD_S = 30.0  # protos.serve.ServerLimits: then a message that is not read ends its stream


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_moe: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = timed_config(tiny_moe, tmp_path_factory.mktemp("outside"), num_prefill=1)
    async with LocalCluster(config) as cluster:
        yield cluster


async def started(cluster: LocalCluster, how: str, *arguments: str) -> Process:
    command = (sys.executable, str(SCRIPT), how, cluster.router_address, *arguments)
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


async def told(process: Process) -> Any:
    """The last line of what it said."""
    stdout, stderr = await asyncio.wait_for(process.communicate(), 110)
    assert process.returncode == 0, stderr.decode()
    return json.loads(stdout.splitlines()[-1])


async def test_whoever_has_reflection_needs_no_files(cluster: LocalCluster) -> None:
    (prompt,) = prompts(1, range(40, 200), seed=31)
    request = {"token_ids": {"ids": prompt}, "sampling": {"temperature": 0, "max_tokens": 20}}
    messages = await told(await started(cluster, "reflected", json.dumps(request)))
    tokens = [int(token) for message in messages for token in message.get("token_ids", ())]
    assert tokens == expected(prompt, 20)
    usage = messages[-1]["usage"]
    assert usage["disaggregated"] and int(usage["output_tokens"]) == 20


async def test_tritonclient_has_the_text_of_our_own(cluster: LocalCluster, tiny_moe: TinyModel) -> None:
    text, sampling = "Grüße, 世界", Sampling(temperature=0, max_tokens=30)
    async with PdserveClient(cluster.router_address) as client:
        parts = [part async for part in client.generate(text, sampling=sampling)]
    ours = "".join(part.text for part in parts if isinstance(part, Chunk))
    request = {
        "model": str(tiny_moe.folder),
        "text": text,
        "parameters": {"temperature": 0.0, "max_tokens": 30},
    }
    theirs = await told(await started(cluster, "triton", json.dumps(request)))
    assert theirs["whole"] == "".join(theirs["pieces"]) == ours != ""
    assert theirs["num_output_tokens"] == 30 and len(theirs["pieces"]) > 5


async def test_readers_that_pause_vanish_and_hang_hold_up_nobody_and_leave_nothing(cluster: LocalCluster) -> None:
    """One does not read, one is killed, one is stopped: its connection is open, and answers no ping."""
    (prompt,) = prompts(1, range(40, 60), seed=32)
    sampling = pb.SamplingParams(temperature=0, max_tokens=400, logprobs=20)  # more than all windows on the way hold
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling).SerializeToString().hex()
    pausing, killed, stopped = [
        await started(cluster, "half", request, str(pause_s)) for pause_s in (UNREAD_S + 15, 0, 0)
    ]
    try:
        for process in (pausing, killed, stopped):
            assert process.stdout is not None
            assert await asyncio.wait_for(process.stdout.readline(), 30) == b"begun\n"
            if process is killed:
                process.kill()
            if process is stopped:
                process.send_signal(signal.SIGSTOP)
        asked = prompts(4, range(20, 200), seed=33)
        async with PdserveClient(cluster.router_address) as client:
            answers = await asyncio.gather(*await ask_all(client, asked, 60))
        for each, answered in zip(asked, answers, strict=True):
            assert answered.token_ids == expected(each, 60) and answered.usage.num_resumes == 0
        await assert_at_rest(cluster, within_s=UNREAD_S + 15)
        refused = await told(pausing)
        assert refused["code"] == "RESOURCE_EXHAUSTED" and "read" in refused["details"]
    finally:
        for process in (pausing, killed, stopped):
            if process.returncode is None:
                process.kill()
            await process.wait()
