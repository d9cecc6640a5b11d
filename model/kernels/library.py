"""Compiles the C kernels for this machine on first use, keeps the result in the cache folder, and loads it.

The library is linked with the OpenMP runtime that torch brings along: two runtimes would each keep their own threads busy.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-std=gnu11", "-Wall", "-mavx2", "-mfma", "-mf16c", "-fopenmp", "-fPIC")
NEEDED_OF_CPU = {"avx2", "fma", "f16c"}


class KernelsUnavailable(Exception):
    """The kernels cannot run here; the message says why."""


@functools.cache
def load() -> ctypes.CDLL:
    """The library, compiled if no process did so before."""
    lacking = NEEDED_OF_CPU - _cpu_features()
    if lacking:
        raise KernelsUnavailable(f"this CPU lacks {', '.join(sorted(lacking))}")
    runtime = _openmp_runtime()
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise KernelsUnavailable("there is no C compiler: install gcc, or name one in CC")
    sources = sorted(SOURCES.glob("*.c"))
    content = b"".join(path.read_bytes() for path in [*sources, SOURCES / "kernels.h"])
    version = _run([compiler, "--version"])
    identity = "\n".join((*FLAGS, str(runtime), version)).encode()
    folder = Path(os.environ.get("PDSERVE_CACHE") or Path.home() / ".cache" / "pdserve") / "kernels"
    library = folder / f"{hashlib.sha256(content + identity).hexdigest()[:24]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as build:
            _compile(compiler, sources, runtime, Path(build)).replace(library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be loaded: {error}") from error


def _compile(compiler: str, sources: list[Path], runtime: Path, build: Path) -> Path:
    """Compiles and links in two steps: linking with -fopenmp would bring in the compiler's own runtime."""
    objects = [build / path.with_suffix(".o").name for path in sources]
    for source, target in zip(sources, objects, strict=True):
        _run([compiler, *FLAGS, "-c", "-o", str(target), str(source)])
    library = build / "kernels.so"
    _run([compiler, "-shared", "-o", str(library), *map(str, objects), str(runtime), "-lm"])
    return library


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise KernelsUnavailable(f"{' '.join(command)} failed: {error.stderr.strip()[-1000:]}") from error
    except OSError as error:
        raise KernelsUnavailable(f"{command[0]} cannot be run: {error}") from error


def _cpu_features() -> set[str]:
    if platform.machine() != "x86_64":
        return set()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _openmp_runtime() -> Path:
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    found += sorted((Path(torch.__file__).parent.parent / "torch.libs").glob("libgomp*.so*"))
    if not found:
        raise KernelsUnavailable("torch here does not use GNU OpenMP, which the kernels share with it")
    return found[0]
