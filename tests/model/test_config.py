"""Configs in the spellings of several transformers versions, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model.config import ModelConfig, RopeConfig, UnreadableModel, UnsupportedModel

# As published with Llama 3.2, Qwen 2.5, Qwen 3 and Mixtral (sizes changed), by transformers 4 and 5.
LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [7, 8],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN2: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 9,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "layer_types": ["full_attention"] * 24,
    "rope_scaling": None,
}
MIXTRAL: dict[str, object] = {
    "architectures": ["MixtralForCausalLM"],
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": None,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def test_llama() -> None:
    config = ModelConfig.from_json(LLAMA, {})
    assert config.rope == RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (16, 32, 8, 64)
    assert (config.dtype, config.tie_word_embeddings, config.max_position_embeddings) == ("bfloat16", True, 131072)
    assert not (config.qkv_bias or config.output_bias or config.qk_norm or config.num_experts)


def test_llama_with_attention_bias_has_it_on_all_four() -> None:
    config = ModelConfig.from_json(LLAMA | {"attention_bias": True}, {})
    assert config.qkv_bias and config.output_bias


def test_qwen2_has_bias_on_three_and_a_window_it_does_not_use() -> None:
    config = ModelConfig.from_json(QWEN2, {})
    assert config.qkv_bias and not config.output_bias
    assert config.head_dim == 896 // 14
    assert config.rope == RopeConfig(1000000.0)


def test_qwen3_has_head_norms() -> None:
    config = ModelConfig.from_json(QWEN3, {})
    assert config.qk_norm and not config.qkv_bias
    assert config.head_dim == 128


def test_mixtral_in_the_spelling_of_transformers_5() -> None:
    config = ModelConfig.from_json(MIXTRAL, {})
    assert (config.num_experts, config.num_experts_per_token, config.intermediate_size) == (8, 2, 14336)
    assert (config.head_dim, config.dtype, config.rope) == (128, "bfloat16", RopeConfig(1000000.0))


def test_kv_heads_default_to_heads() -> None:
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_json(without, {}).num_kv_heads == 32


def test_end_tokens_of_both_files() -> None:
    assert ModelConfig.from_json(LLAMA, {"eos_token_id": [8, 11]}).eos_token_ids == (7, 8, 11)
    assert ModelConfig.from_json(LLAMA | {"eos_token_id": None}, {}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA, {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported are LlamaForCausalLM"),
        (LLAMA, {"architectures": None}, "architectures is None"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'.*default, linear, llama3"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type is 'dynamic'"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantized"),
        (LLAMA, {"torch_dtype": "float64"}, "dtype is 'float64'"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (LLAMA, {"vocab_size": "many"}, "vocab_size is 'many'"),
        (LLAMA, {"num_key_value_heads": 5}, "32 heads cannot share 5"),
        (LLAMA, {"head_dim": 33}, "head_dim is 33"),
        (QWEN2, {"use_sliding_window": True}, "sliding_window is 32768"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window is 4096"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "9 of 8 experts"),
    ],
)
def test_refuses_by_name(base: dict[str, object], change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_json(base | change, {})


def test_reads_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (7, 8)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 12}')
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (7, 8, 12)


def test_unreadable_folders(tmp_path: Path) -> None:
    with pytest.raises(UnreadableModel, match="nowhere is not a folder"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(UnreadableModel, match=r"config\.json cannot be read: No such file"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnreadableModel, match=r"config\.json is not valid JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UnreadableModel, match="not an object"):
        ModelConfig.from_folder(tmp_path)
