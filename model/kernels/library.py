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
from pathlib import Path

from model.cache_folder import default_cache

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-std=gnu11", "-Wall", "-mavx2", "-mfma", "-mf16c", "-fPIC", "-shared", "-pthread")
NEEDED_OF_CPU = {"avx2", "fma", "f16c"}


class KernelsUnavailable(Exception):
    """The kernels cannot run here; the message says why."""


@functools.cache
def load() -> ctypes.CDLL:
    """The library, compiled if no process did so before."""
    lacking = NEEDED_OF_CPU - _cpu_features()
    if lacking:
        raise KernelsUnavailable(f"this CPU lacks {', '.join(sorted(lacking))}")
    sources = sorted(SOURCES.glob("*.c"))
    content = b"".join(path.read_bytes() for path in [*sources, SOURCES / "kernels.h"])
    folder = default_cache() / "kernels"
    library = folder / f"{hashlib.sha256(content + repr(FLAGS).encode()).hexdigest()[:24]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as build:
            logger.info("compiling the kernels for this machine, once")
            target = Path(build) / library.name
            _run([_compiler(), *FLAGS, "-o", str(target), *map(str, sources), "-lm"])
            target.replace(library)  # at once, so that processes can do this side by side
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be loaded: {error}") from error


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
