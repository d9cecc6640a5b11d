"""What a worker computes with, in words: the router takes workers that say the same to be equally fast."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import astuple
from pathlib import Path

from model.runner import ModelRunner
from model.timed_runner import StepTiming, TimedRunner

_CPU_INFO = Path("/proc/cpuinfo")


def hardware_name(runner: ModelRunner, cpu_info: Path = _CPU_INFO) -> str:
    """A timed worker computes nothing, and is as fast as its timing says."""
    if isinstance(runner, TimedRunner):
        if runner.timing == StepTiming():
            return ""
        digest = hashlib.sha256(repr(astuple(runner.timing)).encode()).hexdigest()
        return f"timing {digest[:8]}"
    import torch

    if runner.cache_device_id >= 0:
        return torch.cuda.get_device_name(runner.cache_device_id)
    num_threads = torch.get_num_threads()
    return f"{_cpu_name(cpu_info)}, {num_threads} thread{'s' * (num_threads != 1)}"


def _cpu_name(cpu_info: Path) -> str:
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.machine()
