"""Sizes read from config.json, against the models that transformers builds from it and against what was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protos.errors import InvalidArgument
from router.model_config import model_shape, read_model_shape
from router.precision import WEIGHT_FORMATS
from tests.router import model_configs as configs

TYPES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
NAMES = [name for name, value in vars(configs).items() if name.isupper() and isinstance(value, dict)]


def test_every_family_has_a_config() -> None:
    assert {getattr(configs, name)["architectures"][0] for name in NAMES} == TYPES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_model_that_transformers_builds(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: dict[str, Any] = getattr(configs, name)
    own = ("architectures", "quantization_config", "torch_dtype")
    built_of = {key: value for key, value in config.items() if key not in own}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(TYPES[config["architectures"][0]], **built_of))
    built = sum(weights.numel() for weights in model.parameters())
    biases = sum(values.numel() for key, values in model.named_buffers() if key.endswith("correction_bias"))
    assert model_shape(config, name).total_weights.value == built + biases


@pytest.mark.parametrize(
    ("config", "total", "active", "counts_lookup"),
    [
        (configs.LLAMA_3_70B, "70.6", "70.6", True),
        (configs.MIXTRAL_8X7B, "46.7", "12.9", True),
        (configs.DEEPSEEK_V3, "671", "37", False),
        (configs.QWEN3_30B_A3B, "30.5", "3.4", True),  # the model card has 3.3, of 3.35
        (configs.GPT_OSS_120B, "116.83", "5.13", False),  # says that it counts the output head and not the embedding
    ],
)
def test_weights_are_as_published(config: dict[str, Any], total: str, active: str, counts_lookup: bool) -> None:
    shape = model_shape(config, "model")
    per_token = shape.active_weights.value + counts_lookup * shape.num_embedding_weights
    for value, published in ((shape.total_weights.value, total), (per_token, active)):
        num_digits = len(published.partition(".")[2])
        assert f"{value / 1e9:.{num_digits}f}" == published


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (configs.LLAMA_3_70B, 327_680),  # 2 * 80 layers * 8 heads * 128 * 2 bytes
        (configs.DEEPSEEK_V3, 70_272),  # 61 layers * (512 + 64) * 2 bytes
        (configs.DEEPSEEK_V2_LITE, 31_104),  # 27 * 576 * 2
        (configs.MIXTRAL_8X7B, 131_072),
        (configs.QWEN3_8B, 147_456),
        (configs.GPT_OSS_120B, 73_728),  # while all layers see it
    ],
)
def test_kv_of_a_token(config: dict[str, Any], token_bytes: int) -> None:
    assert model_shape(config, "model").kv_token_bytes(2).value == token_bytes


def test_kv_of_a_sequence() -> None:
    """2,048 tokens of Llama-3-70B are 671 MB, and 16 such sequences 10.7 GB."""
    kv = model_shape(configs.LLAMA_3_70B, "llama").kv_bytes("KV", 2048, 2)
    assert kv.value == 671_088_640
    assert 16 * kv.value == pytest.approx(10.7e9, rel=0.005)


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    """gpt-oss-120b: 18 layers of 2,048 bytes per token grow, 36,864 bytes, and 18 stay at 128 tokens, 4.7 MB."""
    shape = model_shape(configs.GPT_OSS_120B, "gpt-oss")
    assert shape.kv_bytes("KV", 10_000, 2).value == 36_864 * 10_000 + 36_864 * 128
    assert shape.kv_bytes("KV", 100, 2).value == 73_728 * 100
    mistral = model_shape(configs.MISTRAL_7B, "mistral")
    assert mistral.kv_bytes("KV", 100_000, 2).value == 131_072 * 4096


def test_a_window_that_is_not_used_is_none() -> None:
    assert model_shape(configs.QWEN2_7B, "qwen").attention.num_windowed_layers == 0
    used = configs.QWEN2_7B | {"use_sliding_window": True, "max_window_layers": 21}
    assert model_shape(used, "qwen").attention.num_windowed_layers == 7


def test_weights_in_memory() -> None:
    """Llama-3-70B: 2 * 128,256 * 8,192 = 2.101 billion of embedding and head, 161 * 8,192 of norms stay in 16 bits."""
    shape = model_shape(configs.LLAMA_3_70B, "llama")
    assert shape.weight_bytes(WEIGHT_FORMATS["bf16"]).value == 2 * 70_553_706_496
    in_16_bits = 2 * 128_256 * 8_192 + 161 * 8_192
    assert shape.weight_bytes(WEIGHT_FORMATS["fp8"]).value == 70_553_706_496 + in_16_bits
    oss = model_shape(configs.GPT_OSS_120B, "gpt-oss").weight_bytes(WEIGHT_FORMATS["mxfp4"])
    assert oss.value / 2**30 == pytest.approx(60.8, abs=0.3)  # the checkpoint's size on the model card, in GiB


def test_reads_a_file_or_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configs.MIXTRAL_8X7B))
    assert read_model_shape(folder) == read_model_shape(folder / "config.json")
    assert read_model_shape(folder).name == "my-model"


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers", r"config\.json lacks num_hidden_layers"),
        ({"hidden_size": "4096"}, "hidden_size", r"hidden_size is '4096'; it must be a whole number, 1 or more"),
        ({"vocab_size": 0}, "vocab_size", "vocab_size is 0"),
        ({"num_local_experts": None}, "num_local_experts", "lacks num_local_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok", "9 experts per token of 8"),
        ({"num_key_value_heads": 5}, "num_key_value_heads", "must divide num_attention_heads, 32"),
        ({"architectures": ["MambaForCausalLM"]}, "architectures", "planning knows LlamaForCausalLM, "),
        ({"architectures": None}, "architectures", "architectures is None"),
    ],
)
def test_what_is_wrong_in_a_config_is_named(change: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as refused:
        model_shape(configs.MIXTRAL_8X7B | change, "model")
    assert refused.value.field == field


@pytest.mark.parametrize(("text", "message"), [("[1]", "holds list"), ("{", "is not JSON"), (None, "cannot be read")])
def test_files_that_are_no_config_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        read_model_shape(path)
