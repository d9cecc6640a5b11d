"""Bad input through the whole system: a clear error that names the field, and the service goes on."""

from __future__ import annotations

import asyncio
import math
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.local import ClusterConfig, LocalCluster
from protos.channel import bytes_stream, open_channel, service_errors
from protos.client import PdserveClient
from protos.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, NotFound, ResourceExhausted, ServiceError
from protos.values import Sampling
from tests.cluster.asking import ask, assert_at_rest
from tests.cluster.tiny_model import MAX_CONTEXT, VOCAB_SIZE, TinyModel

module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_moe: TinyModel) -> AsyncIterator[LocalCluster]:
    config = ClusterConfig(
        model=str(tiny_moe.folder),
        num_threads=1,
        worker_arguments=("--runner", "timed", "--num-blocks", "200"),
    )
    async with LocalCluster(config) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[PdserveClient]:
    """Afterwards the service still answers, and holds nothing."""
    async with PdserveClient(cluster.router_address) as client:
        yield client
        answered = await ask(client, [5, 6, 7], Sampling(max_tokens=2))
        assert len(answered.token_ids) == 2
    await assert_at_rest(cluster)


OK = Sampling(max_tokens=4)
REFUSED: list[tuple[str, str | Sequence[int], Sampling, type[ServiceError], str, str]] = [
    ("empty prompt", "", OK, InvalidArgument, "text", "empty"),
    ("no tokens", [], OK, InvalidArgument, "token_ids", "empty|no tokens|at least one"),
    ("token out of vocabulary", [5, VOCAB_SIZE], OK, InvalidArgument, "token_ids", str(VOCAB_SIZE)),
    ("negative token", [-1], OK, InvalidArgument, "token_ids", "-1"),
    ("longer than the context", [5] * MAX_CONTEXT, OK, InvalidArgument, "token_ids", str(MAX_CONTEXT)),
    ("10 MB", "a" * 10_000_000, OK, InvalidArgument, "text", "10000000"),
    ("max_tokens 0", "a", Sampling(max_tokens=0), InvalidArgument, "sampling.max_tokens", "at least 1"),
    ("max_tokens beyond", "a", Sampling(max_tokens=MAX_CONTEXT), InvalidArgument, "sampling.max_tokens", "at most"),
    ("min above max", "a", Sampling(max_tokens=4, min_tokens=5), InvalidArgument, "sampling.min_tokens", "0 to"),
    ("temperature -1", "a", Sampling(temperature=-1), InvalidArgument, "sampling.temperature", "0"),
    ("temperature NaN", "a", Sampling(temperature=math.nan), InvalidArgument, "sampling.temperature", "nan"),
    ("top_p 0", "a", Sampling(top_p=0), InvalidArgument, "sampling.top_p", "above 0"),
    ("top_k -1", "a", Sampling(top_k=-1), InvalidArgument, "sampling.top_k", "0"),
    ("min_p 2", "a", Sampling(min_p=2), InvalidArgument, "sampling.min_p", "0 to 1"),
    ("logprobs 21", "a", Sampling(logprobs=21), InvalidArgument, "sampling.logprobs", "20"),
    ("17 stop texts", "a", Sampling(stop=["x"] * 17), InvalidArgument, "sampling.stop", "at most 16"),
    ("long stop text", "a", Sampling(stop=["x" * 257]), InvalidArgument, "sampling.stop", "1 to 256"),
    ("empty stop text", "a", Sampling(stop=[""]), InvalidArgument, "sampling.stop", "1 to 256"),
    ("bias of no token", "a", Sampling(logit_bias={VOCAB_SIZE: 1}), InvalidArgument, "sampling.logit_bias", "token id"),
    ("bias inf", "a", Sampling(logit_bias={5: math.inf}), InvalidArgument, "sampling.logit_bias", "-100 to 100"),
    ("prompt_logprobs 21", "a", Sampling(prompt_logprobs=21), InvalidArgument, "sampling.prompt_logprobs", "20"),
    ("drafts -1", "a", Sampling(max_draft_tokens=-1), InvalidArgument, "sampling.max_draft_tokens", "0 to 64"),
    ("drafts 65", "a", Sampling(max_draft_tokens=65), InvalidArgument, "sampling.max_draft_tokens", "0 to 64"),
    ("repetition_penalty 0", "a", Sampling(repetition_penalty=0), InvalidArgument, "sampling.repetition_penalty", "0"),
    ("presence inf", "a", Sampling(presence_penalty=math.inf), InvalidArgument, "sampling.presence_penalty", "2"),
]


@module_loop
@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "field", "says"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
async def test_refused_with_the_field_and_the_limit(
    client: PdserveClient,
    prompt: str | Sequence[int],
    sampling: Sampling,
    error: type[ServiceError],
    field: str,
    says: str,
) -> None:
    with pytest.raises(error, match=says) as caught:
        await ask(client, prompt, sampling)
    assert caught.value.field == field


@module_loop
async def test_unknown_model_names_the_one_served(client: PdserveClient, tiny_moe: TinyModel) -> None:
    with pytest.raises(NotFound, match=str(tiny_moe.folder)):
        async for _ in client.generate("a", model="gpt-99", sampling=OK):
            pass


@module_loop
async def test_duplicate_request_id_while_the_first_is_in_flight(client: PdserveClient) -> None:
    first = client.generate("a", request_id="twice", sampling=Sampling(max_tokens=30))
    await anext(first)
    with pytest.raises(AlreadyExists, match="twice"):
        await anext(client.generate("a", request_id="twice", sampling=OK))
    assert len([part async for part in first]) > 1


@module_loop
@pytest.mark.parametrize("deadline_s", [0.0, 0.3])
async def test_deadline(client: PdserveClient, deadline_s: float) -> None:
    with pytest.raises(DeadlineExceeded):
        async for _ in client.generate("a", sampling=Sampling(max_tokens=500), deadline_s=deadline_s):
            pass


@module_loop
async def test_invalid_utf8(cluster: LocalCluster, client: PdserveClient) -> None:
    """A GenerateRequest whose text, field 3, is not UTF-8; no client library would send it."""
    async with open_channel(cluster.router_address) as channel:
        call = bytes_stream(channel, "/pdserve.v1.Inference/Generate")(b"\x1a\x02\xff\xfe", timeout=10)
        with pytest.raises(InvalidArgument, match="UTF-8"), service_errors():
            await call.read()


@module_loop
async def test_message_beyond_the_size_limit(cluster: LocalCluster, client: PdserveClient) -> None:
    with pytest.raises(ResourceExhausted):
        await ask(client, "a" * (17 * 2**20), OK)


@module_loop
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--block-size", "32", "--num-blocks", "100"), "block_size"),
        (("--dtype", "bfloat16"), "dtype"),
    ],
)
async def test_worker_with_another_layout_is_refused(
    cluster: LocalCluster, client: PdserveClient, arguments: tuple[str, ...], says: str
) -> None:
    ended = await asyncio.to_thread(
        pdserve,
        *("worker", "--model", cluster.config.model, "--router", cluster.router_address, "--runner", "timed"),
        *arguments,
    )
    assert ended.returncode == 1
    assert says in last_line(ended)
    assert set(await cluster.workers()) == {"prefill-0", "decode-0"}


@module_loop
async def test_worker_with_another_tokenizer_is_refused(
    cluster: LocalCluster, client: PdserveClient, tiny_moe: TinyModel, tmp_path: Path
) -> None:
    for file in tiny_moe.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"<pad>"', '"<nil>"'))
    ended = await asyncio.to_thread(
        pdserve, "worker", "--model", str(tmp_path), "--router", cluster.router_address, "--runner", "timed"
    )
    assert ended.returncode == 1
    assert "model_digest" in last_line(ended) or "tokenizer" in last_line(ended)


def test_port_in_use(tiny_moe: TinyModel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for command in ("router", "worker"):
            ended = pdserve(command, "--model", str(tiny_moe.folder), "--port", port, *timed(command))
            assert ended.returncode == 1
            assert port in last_line(ended)


def test_unreadable_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{ nonsense")
    for folder, says in ((tmp_path, "config.json"), (tmp_path / "absent", "absent")):
        for command in ("router", "worker"):
            ended = pdserve(command, "--model", str(folder), "--port", "0", *timed(command))
            assert ended.returncode == 1
            assert says in last_line(ended)


@pytest.mark.parametrize("gigabytes", ["0.000001", "4000"])
def test_cache_that_does_not_fit_the_memory(tiny_moe: TinyModel, gigabytes: str) -> None:
    ended = pdserve("worker", "--model", str(tiny_moe.folder), "--kv-cache-gb", gigabytes)
    assert ended.returncode == 1
    assert "--kv-cache-gb" in last_line(ended)


def timed(command: str) -> list[str]:
    return ["--runner", "timed"] if command == "worker" else []


def pdserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def last_line(ended: subprocess.CompletedProcess[str]) -> str:
    """What a person reads: one sentence, no traceback."""
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.stderr.strip().splitlines()[-1]
