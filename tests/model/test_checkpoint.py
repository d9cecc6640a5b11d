"""Weights are mapped, not copied; damage is named; digests notice what matters."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import map_weights, model_digest, tokenizer_digest
from model.config import ModelConfig, UnreadableModel
from tests.model.tiny_models import build

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    build("mixtral", folder, torch.bfloat16)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Iterator[Path]:
    yield Path(shutil.copytree(pristine, tmp_path / "model"))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Changes tensors of the single weight file; None removes one. Names with _ for . ."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {
        name.replace("__", "."): tensor for name, tensor in changes.items() if tensor is not None
    }
    removed = {name.replace("__", ".") for name, tensor in changes.items() if tensor is None}
    save_file({name: tensor for name, tensor in tensors.items() if name not in removed}, path)


def mapped(folder: Path) -> dict[str, torch.Tensor]:
    return map_weights(folder, ModelConfig.from_folder(folder))


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{index % 2 + 1:05}-of-00002.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_weights_lie_in_the_mapped_file(folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    weights = mapped(folder)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    ranges = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(folder / "model.safetensors") in line
    ]
    assert all(any(start <= weight.data_ptr() < end for start, end in ranges) for weight in weights.values())


def test_shards_give_the_same_weights(folder: Path) -> None:
    whole = {name: tensor.clone() for name, tensor in mapped(folder).items()}
    shard(folder)
    weights = mapped(folder)
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[name], whole[name]) for name in whole)


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, model__norm__weight=None)
    with pytest.raises(UnreadableModel, match=r"the weights lack model\.norm\.weight \[36\]"):
        mapped(folder)


def test_unknown_tensor_is_named(folder: Path) -> None:
    rewrite(folder, model__layers__7__bias=torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(UnreadableModel, match=r"the weights have model\.layers\.7\.bias"):
        mapped(folder)


def test_misshaped_tensor_is_named(folder: Path) -> None:
    rewrite(folder, model__norm__weight=torch.zeros(37, dtype=torch.bfloat16))
    with pytest.raises(UnreadableModel, match=r"model\.norm\.weight is \[37\]; by config\.json it is \[36\]"):
        mapped(folder)


def test_another_dtype_is_named(folder: Path) -> None:
    rewrite(folder, model__norm__weight=torch.zeros(36))
    with pytest.raises(UnreadableModel, match=r"model\.norm\.weight is float32; config\.json says bfloat16"):
        mapped(folder)


def test_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UnreadableModel, match=r"model\.safetensors is not a readable safetensors file"):
        mapped(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnreadableModel, match=r"has neither model\.safetensors nor"):
        mapped(folder)


def test_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UnreadableModel, match=r"lacks model-00002-of-00002\.safetensors"):
        mapped(folder)


def test_damaged_index(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text('{"weights": {}}')
    with pytest.raises(UnreadableModel, match="not a safetensors index"):
        mapped(folder)


def test_frequencies_and_a_tied_head_are_not_weights(folder: Path) -> None:
    rewrite(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in mapped(folder)


def test_digest_is_of_content_not_of_place(folder: Path, pristine: Path) -> None:
    assert model_digest(folder) == model_digest(pristine)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_digest_notices_other_files(folder: Path, pristine: Path, name: str) -> None:
    (folder / name).write_text((folder / name).read_text() + "\n")
    assert model_digest(folder) != model_digest(pristine)
    assert (tokenizer_digest(folder) != tokenizer_digest(pristine)) == (name == "tokenizer.json")


def test_digest_notices_other_weights(folder: Path, pristine: Path) -> None:
    rewrite(folder, model__norm__weight=load_file(folder / "model.safetensors")[NORM] + 1)
    assert model_digest(folder) != model_digest(pristine)


def test_digest_of_damaged_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UnreadableModel, match="not a safetensors file"):
        model_digest(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnreadableModel, match=r"tokenizer\.json cannot be read"):
        tokenizer_digest(folder)


def test_digests_need_no_torch() -> None:
    code = "import model.checkpoint, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
