"""Where a model comes from: a folder, the demo models, or the Hugging Face hub. Yields a folder, or says why not."""

from __future__ import annotations

import json
import re
from pathlib import Path

from model.demo_models import DEMO_MODELS, BuildFailed, build

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ("*.json", "*.safetensors", "*.jinja")


class ModelUnavailable(Exception):
    """There is no model under this name, or it cannot be had now; the message says which, and what to do."""


def resolve_model(name: str, cache: Path) -> Path:
    """The folder of a model: config.json, safetensors, tokenizer. May download or build it first, which takes minutes.

    Raises:
        ModelUnavailable
    """
    if name in DEMO_MODELS:
        try:
            return build(name, cache)
        except BuildFailed as error:
            raise ModelUnavailable(str(error)) from error
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder)
    if folder.exists():
        raise ModelUnavailable(
            f"{folder} is a file; a model is a folder with config.json, safetensors and tokenizer.json"
        )
    if _HUB_ID.fullmatch(name):
        return _checked(_downloaded(name))
    demos = " or ".join(DEMO_MODELS)
    raise ModelUnavailable(f"{name!r} is neither a folder here, nor {demos}, nor an owner/name on Hugging Face")


def _checked(folder: Path) -> Path:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelUnavailable(f"{folder} has no config.json, so it is not a model in Hugging Face format")
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path} cannot be read: {error}") from error
    return folder


def _downloaded(hub_id: str) -> Path:
    """From the hub, or from its own cache where that is complete and the hub is out of reach."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise ModelUnavailable(f"huggingface_hub must be installed to download {hub_id}: {error}") from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_WANTED), ignore_patterns=["*/*"]))
    except GatedRepoError as error:
        raise ModelUnavailable(f"{hub_id} asks for its terms to be accepted, and for HF_TOKEN to be set") from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"{hub_id} does not exist on Hugging Face, or is private and HF_TOKEN is unset"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelUnavailable(
            f"{hub_id} is not on this machine, and Hugging Face cannot be reached. Pass a folder instead, or demo-dense"
        ) from error
    except Exception as error:  # the hub's client lets those of its HTTP library through
        raise ModelUnavailable(f"{hub_id} could not be downloaded: {error}") from error
