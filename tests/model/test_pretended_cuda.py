"""The model's path with its tensors on a CUDA device, as far as that shows without one (see `pretended_cuda`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import map_weights
from model.config import ModelConfig
from model.kernel_backend import KernelBackend
from model.kv_cache import CacheDoesNotFit
from model.runner import Chunk
from model.sampling import sample
from model.torch_runner import TorchRunner
from tests.model.parity import BLOCK_SIZE, CHECKS, Model, tokens
from tests.model.pretended_cuda import DEVICE, FREE_BYTES, MixedDevices, pretended_cuda
from tests.model.sampling_cases import mixed_rows, random_logits
from tests.model.tiny_models import build


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with pretended_cuda(monkeypatch) as log:
        yield log


def load(folder: Path, dtype: str = "auto") -> TorchRunner:
    return TorchRunner.load(folder, num_blocks=128, block_size=BLOCK_SIZE, dtype=dtype, device="cuda")


def test_what_is_pretended_refuses_what_a_device_refuses(log: list[str]) -> None:
    there, here = torch.ones(3, device=DEVICE), torch.ones(3)
    assert (there.device, here.to(DEVICE).device, there.to("cpu").device) == (DEVICE, DEVICE, torch.device("cpu"))
    assert (there + 1).device == there.sum().device == there[torch.tensor([0, 2])].device == DEVICE
    assert (there + here.sum()).tolist() == [4.0, 4.0, 4.0]  # a number from the host is welcome
    mixes: list[Callable[[], object]] = [
        lambda: there + here,
        lambda: torch.cat([here, there]),
        lambda: there.add_(here),
    ]
    for mix in mixes:
        with pytest.raises(MixedDevices):
            mix()
    reads: list[Callable[[], object]] = [there.numpy, lambda: np.asarray(there)]
    for read in reads:
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            read()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("family", ["llama-bias", "qwen2", "qwen3", "mixtral"])
def test_parity(check: Callable[[Model], None], family: str, tmp_path: Path, log: list[str]) -> None:
    check(Model(build(family, tmp_path), load(tmp_path)))


def test_runner_says_where_its_cache_is(tmp_path: Path, log: list[str]) -> None:
    build("llama", tmp_path)
    runner = load(tmp_path)
    assert (runner.kernels, runner.cache_device_id) == ("torch", 0)
    assert runner.cache_address == runner.cache.memory.data_ptr()


def test_expert_load_and_tokens_come_back_to_the_host(tmp_path: Path, log: list[str]) -> None:
    build("mixtral", tmp_path)
    prompt = tokens(30)
    step = [Chunk([5, 6], 0, (9,)), *(Chunk(prompt, 0, range(8), row.sampling, prompt, 30) for row in mixed_rows(1))]
    there = load(tmp_path).execute(step)
    here = TorchRunner.load(tmp_path, num_blocks=128, block_size=BLOCK_SIZE, kernels="torch").execute(step)
    assert (there.sampled, there.expert_load) == (here.sampled, here.expert_load)
    assert sum(map(sum, there.expert_load)) == 2 * (32 + 1)


def test_sampling_is_what_it_is_on_the_cpu(log: list[str]) -> None:
    logits, rows = random_logits(20, seed=5), mixed_rows(20)
    logits[7, 3] = torch.nan
    assert [repr(token) for token in sample(logits.to(DEVICE), rows)] == [repr(token) for token in sample(logits, rows)]


def test_a_layer_is_told_when_the_device_has_stored_it_and_a_step_ends_when_the_device_does(
    tmp_path: Path, log: list[str]
) -> None:
    build("llama", tmp_path)
    load(tmp_path).execute([Chunk([3, 4], 0, [0])], lambda layer: log.append(f"layer {layer} told"))
    assert log.index("record 1") < log.index("synchronize 0")  # the device has work while the host waits
    assert log.index("synchronize 0") < log.index("layer 0 told") < log.index("synchronize 1")
    assert log[-3:] == ["synchronize 1", "layer 1 told", "synchronize stream"]


def test_a_step_that_fails_ends_when_the_device_does(tmp_path: Path, log: list[str]) -> None:
    build("llama", tmp_path)

    def layer_done(layer: int) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        load(tmp_path).execute([Chunk([3, 4], 0, [0])], layer_done)
    assert log[-1] == "synchronize stream"


def test_weights_count_in_the_dtype_they_are_placed_in(
    tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that fits beside bfloat16 weights, and not beside the same in float32."""
    build("llama", tmp_path, torch.bfloat16)
    num_weights = sum(weight.numel() for weight in map_weights(tmp_path, ModelConfig.from_folder(tmp_path)).values())
    cache_bytes = load(tmp_path).num_blocks * load(tmp_path, "float32").layout.block_bytes
    free = cache_bytes + 3 * num_weights
    assert free < FREE_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    load(tmp_path)
    with pytest.raises(CacheDoesNotFit, match=f"but {cache_bytes - num_weights} "):
        load(tmp_path, "float32")


def test_a_share_is_of_what_the_weights_leave(tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole a large model's weights would leave no room for that share."""
    build("llama", tmp_path)
    num_weights = sum(weight.numel() for weight in map_weights(tmp_path, ModelConfig.from_folder(tmp_path)).values())
    block_bytes = load(tmp_path).layout.block_bytes
    free = 4 * num_weights + 100 * block_bytes  # float32
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    context: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_context_tokens": BLOCK_SIZE, "device": "cuda"}
    assert TorchRunner.load(tmp_path, kv_cache_share=0.8, **context).num_blocks == 80
    free = num_weights  # not even the weights fit
    with pytest.raises(CacheDoesNotFit, match="of 0 blocks"):
        TorchRunner.load(tmp_path, kv_cache_share=0.8, **context)


def test_kernels_count_weights_that_stay_where_they_are() -> None:
    weight = torch.zeros(10, dtype=torch.bfloat16)
    for dtype, num_bytes in ((torch.float32, 20), (torch.bfloat16, 20), (torch.float16, 20)):
        backend = KernelBackend(dtype)
        assert backend.placed_bytes(weight) == backend.place(weight).nbytes == num_bytes
