"""A cluster whose processes know each other by certificates and a secret, and its users by keys."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.local import LocalCluster
from deploy.process import ChildProcess, Command
from deploy.security_options import as_arguments
from protos import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from protos.caller import Scope
from protos.channel import open_channel, service_errors
from protos.client import PdserveClient
from protos.credentials import Credentials
from protos.errors import PermissionDenied, ServiceError, Unauthenticated, Unavailable
from protos.secret import ClusterSecret
from protos.security import Security
from protos.tls import TlsFiles
from protos.values import Sampling
from router.keys import create_key
from tests.cluster.asking import ask, assert_at_rest
from tests.cluster.timed_cluster import expected, prompts, timed_config
from tests.cluster.tiny_model import TinyModel
from tests.protos.certificates import Authority

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).resolve().parents[2]
SCOPES = {"infer": Scope.INFER, "read": Scope.READ, "operate": Scope.OPERATE}
WRONG_KEY = "pdserve-" + "w" * 43


@dataclass(frozen=True)
class Secured:
    cluster: LocalCluster
    authority: Authority
    tls: TlsFiles
    folder: Path
    keys: dict[str, str]  # by scope
    secret: str

    def client(self, api_key: str = "", tls: TlsFiles | None = None) -> PdserveClient:
        return PdserveClient(self.cluster.router_address, api_key=api_key, tls=tls or TlsFiles(ca=self.authority.path))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured(tiny_moe: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder)
    tls, secret_file, keys_file = authority.issue("cluster"), folder / "secret", folder / "keys.json"
    secret_file.write_text(secrets.token_hex(32))
    keys = {name: create_key(keys_file, name, tenant="t", scopes=scope) for name, scope in SCOPES.items()}
    security = Security(tls=tls, secret_file=secret_file)
    of_worker = replace(security, tls=replace(tls, require_client_cert=True))
    logging = ("--log-level", "debug", "--log-format", "json")
    config = timed_config(
        tiny_moe,
        folder,
        num_prefill=1,
        arguments=(*as_arguments(of_worker), *logging),
        router_arguments=(*as_arguments(security), *logging, "--keys-file", str(keys_file), "--direct"),
        connect=partial(PdserveClient, tls=tls, secret=security.secret()),
    )
    async with LocalCluster(config) as cluster:
        yield Secured(cluster, authority, tls, folder, keys, secret_file.read_text())


async def test_answers_are_handed_over_between_those_that_know_each_other(secured: Secured) -> None:
    asked = prompts(4, range(40, 200), seed=3)
    async with secured.client(secured.keys["infer"]) as client:
        sampling = Sampling(temperature=0, max_tokens=20)
        answers = await asyncio.gather(*(ask(client, prompt, sampling) for prompt in asked))
    for prompt, answered in zip(asked, answers, strict=True):
        assert answered.token_ids == expected(prompt, 20)
        assert answered.usage.disaggregated and answered.usage.num_resumes == 0
    await assert_at_rest(secured.cluster)


@pytest.mark.parametrize("has_certificate", [True, False])
async def test_answer_is_read_at_a_worker_by_who_has_a_certificate_and_a_permit(
    secured: Secured, has_certificate: bool
) -> None:
    """Nobody else is let in there; who has none is answered through the router. The key is for the router alone."""
    tls = secured.authority.issue("user") if has_certificate else TlsFiles(ca=secured.authority.path)
    (prompt,) = prompts(1, range(40, 200), seed=4)
    address, key = secured.cluster.router_address, secured.keys["infer"]
    async with PdserveClient(address, api_key=key, tls=tls, direct=True) as client:
        answered = await ask(client, prompt, Sampling(temperature=0, max_tokens=20))
        assert client._direct is not None and client._direct._credentials is not None
        assert client._direct._credentials.metadata() == ()
        assert (client._direct._avoided_until == 0) == has_certificate
    assert answered.token_ids == expected(prompt, 20)


async def use(scope: str, client: PdserveClient) -> None:
    """A call that needs the scope."""
    match scope:
        case "infer":
            await ask(client, [5, 6, 7], Sampling(temperature=0, max_tokens=2))
        case "read":
            await client.get_status(deadline_s=10)
        case "operate":
            await client.set_draining("decode-1", False, deadline_s=10)


async def test_each_scope_opens_its_own_and_no_other(secured: Secured) -> None:
    for scope in SCOPES:
        async with secured.client(secured.keys[scope]) as client:
            for needed in SCOPES:
                if needed == scope:
                    await use(needed, client)
                else:
                    with pytest.raises(PermissionDenied, match=f"needs the scope {needed}; {scope} has {scope}"):
                        await use(needed, client)


@pytest.mark.parametrize("key, problem", [("", "an API key is needed"), (WRONG_KEY, "the API key is not known")])
async def test_without_a_key_that_is_known_nothing_is_answered(key: str, problem: str, secured: Secured) -> None:
    async with secured.client(key) as client:
        for call in (client.get_status, client.get_model):
            with pytest.raises(Unauthenticated, match=problem):
                await call(deadline_s=10)
        with pytest.raises(Unauthenticated, match=problem):
            await ask(client, [5, 6], Sampling(max_tokens=1))


async def test_workers_answer_routers_and_workers_alone(secured: Secured) -> None:
    """Whoever lacks the certificate does not get in; whoever has one lacks the secret."""
    (secured.folder / "other-secret").write_text("x" * 40)
    other = ClusterSecret(secured.folder / "other-secret")
    strangers: list[tuple[Credentials, type[ServiceError], str]] = [
        (Credentials(TlsFiles(ca=secured.authority.path)), Unavailable, "client certificate"),
        (Credentials(secured.tls), Unauthenticated, "only routers and workers"),
        (Credentials(secured.tls, api_key=secured.keys["operate"]), Unauthenticated, "only routers and workers"),
        (Credentials(secured.tls, other), Unauthenticated, "not that of this cluster"),
    ]
    for worker in (await secured.cluster.workers()).values():
        for credentials, error, problem in strangers:
            async with open_channel(worker.address, credentials) as channel:
                with pytest.raises(error, match=problem), service_errors("nobody"):
                    await prefill_pb2_grpc.PrefillStub(channel).Prefill(prefill_pb2.PrefillRequest()).read()
                with pytest.raises(error, match=problem), service_errors("nobody"):
                    await decode_pb2_grpc.DecodeStub(channel).Describe(decode_pb2.DescribeRequest(), timeout=10)


async def test_a_worker_with_another_secret_is_refused_and_says_why(secured: Secured) -> None:
    other = secured.folder / "another-secret"
    other.write_text("y" * 40)
    security = Security(tls=secured.tls, secret_file=other)
    config = secured.cluster.config
    arguments = [sys.executable, "-P", "-m", "deploy.cli", "worker", "--model", config.model, *config.worker_arguments]
    own = ["--worker-id", "intruder", "--router", secured.cluster.router_address, *as_arguments(security)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = Command("intruder", [*arguments, *own], secured.folder / "intruder.log", environment)
    process = await ChildProcess.start(command)
    try:
        async with asyncio.timeout(60):
            assert await process.wait() == 1
    finally:
        process.kill()
    assert "the secret is not that of this cluster" in process.last_log_lines(1)[0]
    assert "intruder" not in await secured.cluster.workers()


async def test_the_command_line_shows_a_key_from_a_file(secured: Secured) -> None:
    key_file = secured.folder / "read.key"
    key_file.write_text(secured.keys["read"] + "\n")
    command = [sys.executable, "-P", "-m", "deploy.cli", "status", "--router", secured.cluster.router_address]
    trusting = ["--tls-ca", str(secured.authority.path), "--api-key-file", str(key_file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more], capture_output=True, text=True, timeout=60, check=False, env=environment
        )

    shown, refused = await asyncio.gather(asyncio.to_thread(run, *trusting), asyncio.to_thread(run, *trusting[:2]))
    assert shown.returncode == 0 and "decode-1" in shown.stdout
    assert refused.returncode == 1 and refused.stderr.startswith("Error: an API key is needed")


async def test_nothing_secret_is_said_anywhere(secured: Secured) -> None:
    """Last: by now every process has let in and refused all kinds of callers, and has logged it from `debug` on."""
    cluster = secured.cluster
    names = ["router", *(workers := await cluster.workers())]
    private = (secured.folder / "cluster.key").read_text().splitlines()[1]
    hidden = [*secured.keys.values(), WRONG_KEY, secured.secret, "y" * 40, private]
    said = {f"log of {name}": cluster.log_path(name).read_text() for name in names}
    said["log of intruder"] = (secured.folder / "intruder.log").read_text()
    said |= {f"ps of {name}": Path(f"/proc/{cluster.pid(name)}/cmdline").read_text() for name in names}
    addresses = {name: worker.metrics_address for name, worker in workers.items()}
    async with secured.client(secured.keys["read"]) as client:
        addresses["router"] = (await client.get_status(deadline_s=10)).metrics_address
    for name, address in addresses.items():
        said[f"metrics of {name}"] = await asyncio.to_thread(_read, f"http://{address}/metrics")
    assert all(said.values())
    assert 'code="UNAUTHENTICATED"' in said["metrics of router"]
    for what, text in said.items():
        assert not [secret for secret in hidden if secret in text], f"{what} has a secret"
    for name in names:
        lines = [json.loads(line) for line in said[f"log of {name}"].splitlines()]
        assert {line["process"] for line in lines} == {name}


def _read(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as response:
        return str(response.read(), "utf-8")
