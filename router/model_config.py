"""Reads a model's sizes from its config.json, for planning: of more families than are served, and without weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from protos.errors import InvalidArgument
from router.model_shape import AttentionShape, ExpertShape, ModelShape

Json = Mapping[str, object]

_MAX_CONFIG_BYTES = 10_000_000


def read_model_shape(path: Path) -> ModelShape:
    """From a config.json, or the folder that has one.

    Raises:
        InvalidArgument: it is not there, of another family, or lacks a field; the message says which.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_CONFIG_BYTES + 1)
        if len(text) > _MAX_CONFIG_BYTES:
            raise InvalidArgument(
                f"{file} has more than {_MAX_CONFIG_BYTES} bytes: it is no config.json", field="model"
            )
        config = json.loads(text)
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be read: {error.strerror or error}", field="model") from error
    except ValueError as error:
        raise InvalidArgument(f"{file} is not JSON: {error}", field="model") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{file} holds {type(config).__name__}, not an object", field="model")
    return model_shape(config, name=file.resolve().parent.name if file.name == "config.json" else file.stem)


def model_shape(config: Json, name: str) -> ModelShape:
    """
    Raises:
        InvalidArgument
    """
    named = config.get("architectures")
    found = [each for each in named if each in _FAMILIES] if isinstance(named, list) else []
    if not found:
        raise InvalidArgument(
            f"architectures is {named!r}; planning knows {', '.join(_FAMILIES)}", field="architectures"
        )
    return _FAMILIES[found[0]](_Fields(config), found[0], name)


class _Fields:
    """The fields of a config.json, each checked where it is read."""

    def __init__(self, config: Json) -> None:
        self._config = config

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number under the first of these names that is there."""
        name = next((each for each in names if self._config.get(each) is not None), names[0])
        value = self._config.get(name)
        value = default if value is None else value
        if value is None:
            raise InvalidArgument(f"config.json lacks {' or '.join(names)}", field=name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidArgument(f"{name} is {value!r}; it must be a whole number, {least} or more", field=name)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._config.get(name)
        return default if value is None else bool(value)

    def raw(self, name: str) -> object:
        return self._config.get(name)

    def stored_format(self) -> str:
        quantization = self._config.get("quantization_config")
        if quantization is None:
            return "bf16"
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        return str(method or quantization)


def _windows(fields: _Fields, slides: bool) -> tuple[int, int]:
    """Its size, and how many layers have one: those that `layer_types` names, or all from `max_window_layers` on."""
    window = fields.count("sliding_window", default=0, least=0) if slides else 0
    if not window:
        return 0, 0
    kinds = fields.raw("layer_types")
    if isinstance(kinds, list):
        return window, sum(kind == "sliding_attention" for kind in kinds)
    num_layers = fields.count("num_hidden_layers")
    return window, num_layers - min(fields.count("max_window_layers", default=0, least=0), num_layers)


def _gqa(fields: _Fields, *, qkv_bias: bool, output_bias: bool, more: int = 0, slides: bool = False) -> AttentionShape:
    """`more`: weights beside the four matrices and their biases."""
    hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise InvalidArgument(
            f"num_key_value_heads is {num_kv_heads}; it must divide num_attention_heads, {num_heads}",
            field="num_key_value_heads",
        )
    head_dim = fields.count("head_dim", default=hidden // num_heads)
    queries, keys = num_heads * head_dim, num_kv_heads * head_dim
    biases = (queries + 2 * keys) * qkv_bias + hidden * output_bias
    window, num_windowed = _windows(fields, slides)
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_weights=2 * hidden * queries + 2 * hidden * keys + biases + more,
        num_cached_values=2 * keys,
        vector_size=head_dim,
        prefill_flops=4 * queries,
        decode_flops=4 * queries,
        latent=False,
        window=window,
        num_windowed_layers=num_windowed,
    )


def _mla(fields: _Fields) -> AttentionShape:
    hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    latent, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    key, value = fields.count("qk_nope_head_dim") + rope, fields.count("v_head_dim")
    query_rank = fields.count("q_lora_rank", default=0, least=0)
    queries = query_rank * (hidden + 1 + num_heads * key) if query_rank else hidden * num_heads * key
    unpacking = latent * num_heads * (key - rope + value)
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=1,
        num_weights=queries + hidden * (latent + rope) + latent + unpacking + num_heads * value * hidden,
        num_cached_values=latent + rope,
        vector_size=latent + rope,
        prefill_flops=2 * num_heads * (key + value),
        decode_flops=2 * num_heads * (latent + rope + latent),
        latent=True,
        window=0,
        num_windowed_layers=0,
    )


def _model(
    fields: _Fields,
    architecture: str,
    name: str,
    attention: AttentionShape,
    experts: ExpertShape | None,
    dense_biases: int = 0,
) -> ModelShape:
    hidden, num_layers = fields.count("hidden_size"), fields.count("num_hidden_layers")
    num_dense = num_layers - (experts.num_layers if experts else 0)
    if num_dense < 0:
        raise InvalidArgument(f"num_hidden_layers is {num_layers}; fewer than have experts", field="num_hidden_layers")
    if experts and experts.num_chosen > experts.num_experts:
        raise InvalidArgument(
            f"{experts.num_chosen} experts per token of {experts.num_experts}", field="num_experts_per_tok"
        )
    return ModelShape(
        name=name,
        architecture=architecture,
        hidden_size=hidden,
        vocab_size=fields.count("vocab_size"),
        num_layers=num_layers,
        num_dense_layers=num_dense,
        num_dense_weights=3 * hidden * fields.count("intermediate_size") + dense_biases if num_dense else 0,
        attention=attention,
        experts=experts,
        num_norm_weights=hidden * (2 * num_layers + 1),
        tied=fields.flag("tie_word_embeddings"),
        stored=fields.stored_format(),
        max_tokens=fields.count("max_position_embeddings"),
    )


def _llama(fields: _Fields, architecture: str, name: str) -> ModelShape:
    has_biases, is_mistral = fields.flag("attention_bias"), architecture == "MistralForCausalLM"
    attention = _gqa(fields, qkv_bias=has_biases, output_bias=has_biases, slides=is_mistral)
    hidden = fields.count("hidden_size")
    biases = (2 * fields.count("intermediate_size") + hidden) * fields.flag("mlp_bias")
    return _model(fields, architecture, name, attention, None, biases)


def _qwen2(fields: _Fields, architecture: str, name: str) -> ModelShape:
    slides = fields.flag("use_sliding_window")
    return _model(
        fields, architecture, name, _gqa(fields, qkv_bias=True, output_bias=False, slides=slides), experts=None
    )


def _qwen3_attention(fields: _Fields) -> AttentionShape:
    has_biases, head_norms = fields.flag("attention_bias"), 2 * fields.count("head_dim", default=128)
    slides = fields.flag("use_sliding_window")
    return _gqa(fields, qkv_bias=has_biases, output_bias=has_biases, more=head_norms, slides=slides)


def _qwen3(fields: _Fields, architecture: str, name: str) -> ModelShape:
    return _model(fields, architecture, name, _qwen3_attention(fields), experts=None)


def _mixtral(fields: _Fields, architecture: str, name: str) -> ModelShape:
    hidden, num_experts = fields.count("hidden_size"), fields.count("num_local_experts")
    experts = ExpertShape(
        num_layers=fields.count("num_hidden_layers"),
        num_experts=num_experts,
        num_chosen=fields.count("num_experts_per_tok"),
        num_weights=3 * hidden * fields.count("intermediate_size"),
        num_shared_weights=0,
        num_gate_weights=num_experts * hidden,
    )
    return _model(fields, architecture, name, _gqa(fields, qkv_bias=False, output_bias=False, slides=True), experts)


def _qwen3_moe(fields: _Fields, architecture: str, name: str) -> ModelShape:
    hidden, num_experts, num_layers = (fields.count(key) for key in ("hidden_size", "num_experts", "num_hidden_layers"))
    step, dense = fields.count("decoder_sparse_step", default=1), fields.raw("mlp_only_layers")
    dense_layers = set(dense) if isinstance(dense, list) else set()
    experts = ExpertShape(
        num_layers=sum(layer not in dense_layers and (layer + 1) % step == 0 for layer in range(num_layers)),
        num_experts=num_experts,
        num_chosen=fields.count("num_experts_per_tok"),
        num_weights=3 * hidden * fields.count("moe_intermediate_size"),
        num_shared_weights=0,
        num_gate_weights=num_experts * hidden,
    )
    return _model(fields, architecture, name, _qwen3_attention(fields), experts)


def _deepseek(fields: _Fields, architecture: str, name: str) -> ModelShape:
    hidden, num_experts = fields.count("hidden_size"), fields.count("n_routed_experts")
    expert = 3 * hidden * fields.count("moe_intermediate_size")
    num_biases = num_experts if architecture == "DeepseekV3ForCausalLM" else 0  # of selection
    experts = ExpertShape(
        num_layers=fields.count("num_hidden_layers") - fields.count("first_k_dense_replace", default=0, least=0),
        num_experts=num_experts,
        num_chosen=fields.count("num_experts_per_tok"),
        num_weights=expert,
        num_shared_weights=expert * fields.count("n_shared_experts", default=0, least=0),
        num_gate_weights=num_experts * hidden + num_biases,
    )
    return _model(fields, architecture, name, _mla(fields), experts)


def _gpt_oss(fields: _Fields, architecture: str, name: str) -> ModelShape:
    hidden, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    num_experts, num_sinks = fields.count("num_local_experts"), fields.count("num_attention_heads")
    has_biases = fields.flag("attention_bias", default=True)
    if not isinstance(fields.raw("layer_types"), list):
        raise InvalidArgument("config.json lacks layer_types, which says where its window holds", field="layer_types")
    experts = ExpertShape(
        num_layers=fields.count("num_hidden_layers"),
        num_experts=num_experts,
        num_chosen=fields.count("num_experts_per_tok", "experts_per_token"),
        num_weights=3 * hidden * inner + 2 * inner + hidden,
        num_shared_weights=0,
        num_gate_weights=num_experts * (hidden + 1),
    )
    attention = _gqa(fields, qkv_bias=has_biases, output_bias=has_biases, more=num_sinks, slides=True)
    return _model(fields, architecture, name, attention, experts)


_FAMILIES: dict[str, Callable[[_Fields, str, str], ModelShape]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
    "GptOssForCausalLM": _gpt_oss,
}
