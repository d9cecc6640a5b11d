"""The router process: what it reads of a model folder, and how it starts and ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from model.chat_template import ChatMessage
from model.config import UnreadableModel
from model.model_source import ModelUnavailable
from model.tokenizer import TokenizerUnusable
from protos import workers_pb2
from protos.client import PdserveClient
from protos.errors import Unavailable
from protos.values import Sampling, Summary
from router.config import RouterConfig
from router.server import load_card, serve_router
from tests.router.fakes import FakeWorker, HandOver

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights: the router needs none."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "dtype": "float32",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    return folder


def test_card_is_read_from_the_folder(folder: Path) -> None:
    card = load_card("mine", folder)
    assert (card.name, card.architecture, card.max_context_tokens) == ("mine", "LlamaForCausalLM", 128)
    assert (card.vocab_size, card.eos_token_ids) == (300, (2,))
    assert len(card.tokenizer.encode("abc")) == 3
    assert card.tokenizer.encode_chat([ChatMessage("user", "abc")]) == card.tokenizer.encode("abc")
    assert len(card.tokenizer_digest) == 32


@pytest.mark.parametrize("missing, error", [("config.json", UnreadableModel), ("tokenizer.json", TokenizerUnusable)])
def test_folder_that_lacks_a_file_names_it(folder: Path, tmp_path: Path, missing: str, error: type[Exception]) -> None:
    for path in folder.iterdir():
        if path.name != missing:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(error, match=missing):
        load_card("mine", tmp_path)


async def test_model_that_is_not_there() -> None:
    with pytest.raises(ModelUnavailable, match="no-such-model"):
        await serve_router(RouterConfig("no-such-model", port=0))


async def test_port_in_use(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"):
            await serve_router(RouterConfig(str(folder), port=port))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


async def serving(port: int) -> None:
    async with PdserveClient(f"127.0.0.1:{port}") as client, asyncio.timeout(10):
        while not await _answers(client):
            await asyncio.sleep(0.01)


async def _answers(client: PdserveClient) -> bool:
    try:
        await client.get_status()
    except Unavailable:
        return False
    return True


async def test_signal_lets_what_runs_finish(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    caplog.set_level(logging.INFO, logger="router.server")
    running = asyncio.create_task(serve_router(RouterConfig(str(folder), port=port, metrics_port=0, drain_s=10)))
    await serving(port)
    worker = FakeWorker("w", workers_pb2.ROLE_BOTH, HandOver(), "e1", num_blocks=100)
    worker.tokenizer_digest = load_card("mine", folder).tokenizer_digest

    async def some_time(attempt_id: str, num_tokens: int) -> None:
        await asyncio.sleep(0.01)

    worker.hooks["decode.token"] = some_time
    await worker.start(f"127.0.0.1:{port}")
    async with PdserveClient(f"127.0.0.1:{port}") as client:
        answer = client.generate("abc", sampling=Sampling(max_tokens=10, ignore_eos=True))
        await anext(answer)
        os.kill(os.getpid(), signal.SIGTERM)
        parts = [part async for part in answer]
    assert isinstance(parts[-1], Summary) and parts[-1].usage.output_tokens == 10
    await asyncio.wait_for(running, 5)
    await worker.die()
    assert "draining: 1 requests are in flight" in caplog.text


async def test_second_signal_ends_it_at_once(folder: Path) -> None:
    port = free_port()
    running = asyncio.create_task(serve_router(RouterConfig(str(folder), port=port, drain_s=60)))
    await serving(port)
    worker = FakeWorker("w", workers_pb2.ROLE_BOTH, HandOver(), "e1", num_blocks=100)
    worker.tokenizer_digest = load_card("mine", folder).tokenizer_digest
    never = asyncio.Event()

    async def wait(attempt_id: str, num_tokens: int) -> None:
        await never.wait()

    worker.hooks["decode.token"] = wait
    await worker.start(f"127.0.0.1:{port}")
    async with PdserveClient(f"127.0.0.1:{port}") as client:
        reading = asyncio.ensure_future(anext(client.generate("abc")))
        async with asyncio.timeout(5):
            while not worker.decodes:
                await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert not running.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 5)
        await asyncio.wait([reading])
        assert reading.exception() is not None
    await worker.die()


def test_importing_the_router_loads_no_torch_and_no_nixl() -> None:
    code = "import router.server, sys; print(sorted({'torch', 'nixl', 'transformers', 'numpy'} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"
