"""Makes the runner that a worker's flags ask for, and sizes its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.drafting import choose_drafter
from deploy.worker_config import WorkerConfig
from kvtransfer.ticket import AS_IS
from model.checkpoint import model_digest
from model.config import ModelConfig
from model.kv_layout import KVLayout
from model.runner import Chunk, DraftingState, ModelRunner
from model.sampling_params import SamplingParams

_GIB = 1 << 30
_CPU_SHARE = 1 / 8  # of the memory that is free; other workers start on the same machine at the same time
_CUDA_SHARE = 0.8  # of what the weights leave; a step needs memory too
_WARM_UP_DRAFTS = 2  # the second token of a draft goes ways of its own


def load_runner(config: WorkerConfig, folder: Path) -> ModelRunner:
    """Raises ValueError, naming what would be right, if the model cannot be run or its cache does not fit."""
    return _timed_runner(config, folder) if config.runner == "timed" else _torch_runner(config, folder)


def max_context_tokens(config: WorkerConfig, folder: Path) -> int:
    """Of a sequence: what the model allows, or less if so configured. Raises ValueError for more."""
    own = ModelConfig.from_folder(folder).max_position_embeddings
    if config.max_context is not None and config.max_context > own:
        raise ValueError(f"--max-context is {config.max_context}; it must be at most {own}, the model's own context")
    return config.max_context or own


def warm_up(runner: ModelRunner, num_tokens: int) -> None:
    """Runs a prompt, a decode step and one with a draft (but for prompt look-up, which has none) over blocks that
    nobody has yet: weights are read in, threads and buffers made.

    Without it the first request would pay for that, seconds where the weights are not in memory.
    """
    num_tokens = min(num_tokens, runner.num_blocks * runner.layout.block_size - 1)
    num_drafts = min(_WARM_UP_DRAFTS, runner.num_blocks * runner.layout.block_size - 1 - num_tokens)
    prompt = [1 + index % 50 for index in range(num_tokens)]
    block_ids = range(runner.layout.num_blocks(num_tokens + 1 + num_drafts))
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    drafting = DraftingState()
    runner.execute([Chunk(prompt, 0, block_ids, greedy, prompt, num_tokens, drafting=drafting)])
    history = [*prompt, 0]  # not in the prompt: look-up has nothing to say, and whoever drafts behind it is warmed up
    for count in (0, num_drafts) if num_drafts else (0,):
        runner.execute([Chunk([0], num_tokens, block_ids, greedy, history, num_tokens, count, drafting)])


def _torch_runner(config: WorkerConfig, folder: Path) -> ModelRunner:
    from decode.speculative_runner import SpeculativeRunner
    from decode.verification import Method
    from model.torch_runner import TorchRunner

    device = _device(config.device)
    plan = choose_drafter(config, folder)
    target = TorchRunner.load(
        folder,
        **_cache_size(config, device),
        block_size=config.block_size,
        max_context_tokens=max_context_tokens(config, folder),
        dtype=config.dtype,
        device=device,
        num_threads=config.num_threads,
        num_draft_layers=0 if plan is None else plan.num_layers,
        drafter="" if plan is None else plan.name,
        draft_weights=() if plan is None else plan.weights,
    )
    if plan is None:
        return target
    method = Method(config.verification)
    return SpeculativeRunner(target, plan.make(target, method), method, plan.kind)


def _device(name: str) -> str:
    """Raises ValueError if torch does not see it."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if num_gpus else "cpu"
    if name != "cpu" and int(name.partition(":")[2] or 0) >= num_gpus:
        raise ValueError(f"--device is {name}, but torch sees {num_gpus or 'no'} CUDA device{'s' * (num_gpus != 1)}")
    return name


def _cache_size(config: WorkerConfig, device: str) -> dict[str, Any]:
    """As `TorchRunner.load` takes it."""
    import torch

    from model.kv_cache import available_bytes

    if config.num_blocks is not None:
        return {"num_blocks": config.num_blocks}
    if config.kv_cache_gb is not None:
        return {"kv_cache_bytes": int(config.kv_cache_gb * _GIB)}
    if device == "cpu":
        return {"kv_cache_bytes": int(available_bytes(torch.device(device)) * _CPU_SHARE)}
    return {"kv_cache_share": _CUDA_SHARE}


def _timed_runner(config: WorkerConfig, folder: Path) -> ModelRunner:
    from model.timed_runner import StepTiming, TimedRunner
    from model.tokenizer import Tokenizer

    if config.drafter not in ("auto", "none"):
        raise ValueError(f"--drafter {config.drafter} needs --runner torch: a timed worker computes nothing to verify")
    if config.draft_shape == "tree":
        raise ValueError("--draft-shape tree needs --runner torch: a timed worker computes nothing to verify")
    if config.wire_kv != AS_IS:
        raise ValueError(
            f"--wire-kv {config.wire_kv} needs --runner torch: timed workers check every bit of the KV they receive"
        )
    model = ModelConfig.from_folder(folder)
    max_context_tokens(config, folder)  # refuses what is too much; nothing here is sized by it
    layout = KVLayout(
        model_digest=model_digest(folder),
        dtype=model.dtype if config.dtype == "auto" else config.dtype,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
    )
    cache_bytes = int((config.kv_cache_gb or 1.0) * _GIB)
    return TimedRunner(
        layout,
        config.num_blocks or max(2, cache_bytes // layout.block_bytes),
        StepTiming() if config.timing is None else StepTiming.load(config.timing),
        vocab_size=model.vocab_size,
        never_sampled=Tokenizer.load(folder).eos_token_ids,
    )
