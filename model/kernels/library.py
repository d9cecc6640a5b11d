"""Compiles the C kernels for this machine on first use, keeps the result in the cache folder, and loads it.

It knows how to get a library, not what is in it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from model.cache_folder import default_cache

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-std=gnu11", "-Wall", "-fPIC", "-shared", "-pthread")
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # Linux on x86-64


@dataclass(frozen=True, slots=True)
class Build:
    """What the kernels are compiled for."""

    name: str
    needed_of_cpu: tuple[str, ...]  # as /proc/cpuinfo names it
    flags: tuple[str, ...]


AVX2 = Build("avx2", ("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c"))
AVX512 = Build(
    "avx512",
    (*AVX2.needed_of_cpu, "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    (*AVX2.flags, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
)
# Rounds activations to bfloat16, so it is not among those that only differ in speed.
AVX512_BF16 = Build("avx512_bf16", (*AVX512.needed_of_cpu, "avx512_bf16"), (*AVX512.flags, "-mavx512bf16"))
AMX = Build(
    "amx",
    (*AVX512.needed_of_cpu, "avx512_bf16", "amx_tile", "amx_bf16"),
    (*AVX512.flags, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
)
BUILDS = (AMX, AVX512, AVX2)  # the fastest first


class KernelsUnavailable(Exception):
    """The kernels cannot run here; the message says why."""


def builds() -> list[Build]:
    """Those that this machine can run, the fastest first.

    Raises:
        KernelsUnavailable: it can run none.
    """
    features = _cpu_features()
    lacking = set(AVX2.needed_of_cpu) - features
    if lacking:
        raise KernelsUnavailable(f"this CPU lacks {', '.join(sorted(lacking))}")
    runnable = [build for build in BUILDS if features.issuperset(build.needed_of_cpu)]
    return runnable if AMX not in runnable or _tiles_permitted() else [b for b in runnable if b != AMX]


def can_round() -> bool:
    """Whether this machine can run AVX512_BF16."""
    return _cpu_features().issuperset(AVX512_BF16.needed_of_cpu)


@functools.cache
def load(build: Build) -> ctypes.CDLL:
    """The library, compiled if no process did so before."""
    sources = sorted(SOURCES.glob("*.c"))
    flags = (*FLAGS, *build.flags)
    content = b"".join(path.read_bytes() for path in [*sources, SOURCES / "kernels.h"])
    folder = default_cache() / "kernels"
    library = folder / f"{hashlib.sha256(content + repr(flags).encode()).hexdigest()[:24]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
            logger.info("compiling the kernels for this machine, once")
            target = Path(scratch) / library.name
            _run([_compiler(), *flags, "-o", str(target), *map(str, sources), "-lm"])
            target.replace(library)  # at once, so that processes can do this side by side
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be loaded: {error}") from error


def load_fastest() -> tuple[Build, ctypes.CDLL]:
    """Of what this machine can run and its compiler can compile.

    Raises:
        KernelsUnavailable: that is nothing.
    """
    *better, last = builds()
    for build in better:
        try:
            return build, load(build)
        except KernelsUnavailable as error:
            logger.warning("no kernels for %s, slower ones are used: %s", build.name, error)
    return last, load(last)


def load_fastest_rounding() -> tuple[Build, ctypes.CDLL]:
    """The same where activations may be rounded to bfloat16."""
    build, kernels = load_fastest()
    if build != AVX512 or not can_round():
        return build, kernels
    try:
        return AVX512_BF16, load(AVX512_BF16)
    except KernelsUnavailable as error:
        logger.info("no kernels for %s: %s", AVX512_BF16.name, error)
        return build, kernels


def _tiles_permitted() -> bool:
    """Whether the kernel lets this process use the registers of AMX, which it has to ask for."""
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0)


def _compiler() -> str:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise KernelsUnavailable("there is no C compiler: install gcc, or name one in CC")
    return compiler


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise KernelsUnavailable(f"{' '.join(command)} failed: {error.stderr.strip()[-1000:]}") from error
    except OSError as error:
        raise KernelsUnavailable(f"{command[0]} cannot be run: {error}") from error


def _cpu_features() -> set[str]:
    if platform.machine() != "x86_64":
        return set()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())
