"""The files of a model: weights mapped from safetensors and used in place, and digests that stand for their identity.

Mapped pages belong to the page cache, so processes that serve one model on one machine share them.
Digests need no torch.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from model.config import ModelConfig, UnreadableModel

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

_INDEX = "model.safetensors.index.json"
_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100 << 20


def model_digest(folder: Path) -> str:
    """Stands for config, tokenizer and weights: headers, sizes, and a sample of the bytes of each weight file."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        _add(digest, name, _read(folder / name))
    for path in weight_files(folder):
        with _open(path) as file:
            size = path.stat().st_size
            header_bytes = _header_bytes(path, file.read(8), size)
            _add(digest, f"{path.name} {size}", file.read(header_bytes))
            step = max((size - header_bytes) // _SAMPLES_PER_FILE, _SAMPLE_BYTES)
            for offset in range(8 + header_bytes, size, step):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def tokenizer_digest(folder: Path) -> str:
    """Equal for two folders whose token ids mean the same text."""
    digest = hashlib.sha256()
    _add(digest, "tokenizer.json", _read(folder / "tokenizer.json"))
    return digest.hexdigest()[:32]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index where it has one."""
    index = folder / _INDEX
    if not index.exists():
        files = [folder / "model.safetensors"]
        if not files[0].exists():
            raise UnreadableModel(f"{folder} has neither model.safetensors nor {_INDEX}")
        return files
    try:
        names = sorted(set(json.loads(_read(index))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnreadableModel(f"{index} is not a safetensors index: {error!r}") from error
    for name in names:
        if not (folder / name).is_file():
            raise UnreadableModel(f"{folder} lacks {name}, which its index names")
    return [folder / name for name in names]


def map_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """All tensors the model is made of, by their Hugging Face names, as views of the mapped files.

    Raises:
        UnreadableModel: a file is damaged, or a tensor is missing, unknown or of another shape than the config's.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError) as error:
            raise UnreadableModel(f"{path} is not a readable safetensors file: {error}") from error
    _drop_unused(found, config)
    check_shapes({name: tuple(tensor.shape) for name, tensor in found.items()}, config)
    for name, tensor in found.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != config.dtype:
            raise UnreadableModel(f"{name} is {dtype}; config.json says {config.dtype}")
    return found


def check_shapes(found: Mapping[str, Shape], config: ModelConfig) -> None:
    """Raises UnreadableModel naming the first tensor that is missing, misshaped or not of this model."""
    expected = dict(expected_shapes(config))
    for name, shape in expected.items():
        if name not in found:
            raise UnreadableModel(f"the weights lack {name} {list(shape)}")
        if found[name] != shape:
            raise UnreadableModel(f"{name} is {list(found[name])}; by config.json it is {list(shape)}")
    extra = sorted(found.keys() - expected.keys())
    if extra:
        raise UnreadableModel(f"the weights have {extra[0]}, which {config.architecture} does not use")


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every tensor, as Hugging Face names them."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield from ((f"{prefix}self_attn.{name}", shape) for name, shape in _attention_shapes(config))
        yield from ((prefix + name, shape) for name, shape in _feed_forward_shapes(config))
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _attention_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name, size in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        yield f"{name}.weight", (size, config.hidden_size)
        if config.qkv_bias:
            yield f"{name}.bias", (size,)
    yield "o_proj.weight", (config.hidden_size, query)
    if config.output_bias:
        yield "o_proj.bias", (config.hidden_size,)
    if config.qk_norm:
        yield "q_norm.weight", (config.head_dim,)
        yield "k_norm.weight", (config.head_dim,)


def _feed_forward_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    up, down = (config.intermediate_size, config.hidden_size), (config.hidden_size, config.intermediate_size)
    if config.num_experts:
        yield "block_sparse_moe.gate.weight", (config.num_experts, config.hidden_size)
        for expert in range(config.num_experts):
            for name, shape in (("w1", up), ("w2", down), ("w3", up)):
                yield f"block_sparse_moe.experts.{expert}.{name}.weight", shape
        return
    for name, shape in (("gate_proj", up), ("up_proj", up), ("down_proj", down)):
        yield f"mlp.{name}.weight", shape


def _drop_unused(found: dict[str, Tensor], config: ModelConfig) -> None:
    """Old checkpoints store what follows from the config: rotary frequencies, and a tied head a second time."""
    for name in [name for name in found if name.endswith("rotary_emb.inv_freq")]:
        del found[name]
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)


def _header_bytes(path: Path, prefix: bytes, size: int) -> int:
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
        raise UnreadableModel(f"{path} is not a safetensors file: its header would be {length} of {size} bytes")
    return int(length)


def _read(path: Path) -> bytes:
    with _open(path) as file:
        return file.read()


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UnreadableModel(f"{path} cannot be read: {error.strerror or error}") from error


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    digest.update(f"{name} {len(content)}\n".encode())
    digest.update(content)
