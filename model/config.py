"""What a Hugging Face folder says about its model, as one frozen value. No torch: reading a config costs nothing.

One decoder covers the families of `SUPPORTED`; whatever a config asks for beyond that is refused here, by name, so that
nothing is ever computed a little wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Json = Mapping[str, object]

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3")


class UnsupportedModel(ValueError):
    """The config asks for something this decoder does not compute. The message says what, and what it does."""


class UnreadableModel(ValueError):
    """The folder, or a file of it, is missing, damaged or does not fit the rest."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `factor` slows all frequencies (linear), or the low ones (llama3, by the last three too)."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    dtype: str  # of the weights
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of one expert, if there are experts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    qk_norm: bool
    num_experts: int  # 0: dense
    num_experts_per_token: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Reads config.json, and generation_config.json for further end tokens.

        Raises:
            UnreadableModel: a file is missing or no JSON object.
            UnsupportedModel: the model is none that this decoder computes exactly.
        """
        if not folder.is_dir():
            raise UnreadableModel(f"{folder} is not a folder; a model is a folder with config.json and *.safetensors")
        config = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        return cls.from_json(config, _read_json(generation) if generation.exists() else {})

    @classmethod
    def from_json(cls, config: Json, generation: Json) -> ModelConfig:
        architecture = _architecture(config)
        _refuse_unsupported(config, architecture)
        num_heads = _int(config, "num_attention_heads")
        hidden_size = _int(config, "hidden_size")
        is_mixtral, is_qwen2 = architecture == "MixtralForCausalLM", architecture == "Qwen2ForCausalLM"
        attention_bias = bool(config.get("attention_bias", False)) and not is_mixtral
        model = cls(
            architecture=architecture,
            dtype=_dtype(config),
            vocab_size=_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_int(config, "intermediate_size"),
            num_layers=_int(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_int(config, "num_key_value_heads", num_heads),
            head_dim=_int(config, "head_dim", hidden_size // num_heads),
            max_position_embeddings=_int(config, "max_position_embeddings"),
            norm_eps=_float(config, "rms_norm_eps", 1e-5 if is_mixtral else 1e-6),
            rope=_rope(config, 1e6 if is_mixtral else 1e4),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=is_qwen2 or attention_bias,
            output_bias=attention_bias and not is_qwen2,
            qk_norm=architecture == "Qwen3ForCausalLM",
            num_experts=_int(config, "num_local_experts", 8) if is_mixtral else 0,
            num_experts_per_token=_int(config, "num_experts_per_tok", 2) if is_mixtral else 0,
            eos_token_ids=_eos_token_ids(config, generation),
        )
        model._check()
        return model

    def _check(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        if self.num_experts and not 1 <= self.num_experts_per_token <= self.num_experts:
            raise UnsupportedModel(f"{self.num_experts_per_token} of {self.num_experts} experts per token")


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableModel(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UnreadableModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnreadableModel(f"{path} holds {type(value).__name__}, not an object")
    return value


def _architecture(config: Json) -> str:
    named = config.get("architectures")
    found = [name for name in named if name in SUPPORTED] if isinstance(named, list) else []
    if not found:
        raise UnsupportedModel(f"architectures is {named!r}; supported are {', '.join(SUPPORTED)}")
    return str(found[0])


def _refuse_unsupported(config: Json, architecture: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act is {activation!r}; supported is 'silu'")
    slides = config.get(
        "use_sliding_window", not architecture.startswith("Qwen")
    )  # Qwen names a window it does not use
    if config.get("sliding_window") is not None and slides:
        raise UnsupportedModel(f"sliding_window is {config['sliding_window']!r}; supported is full attention (null)")
    if config.get("mlp_bias", False) and architecture == "LlamaForCausalLM":
        raise UnsupportedModel("mlp_bias is true; supported are feed-forward nets without bias")
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list) and set(layer_types) - {"full_attention"}:
        other = sorted(set(layer_types) - {"full_attention"})
        raise UnsupportedModel(f"layer_types has {', '.join(other)}; supported is full_attention")
    if config.get("quantization_config") is not None:
        raise UnsupportedModel(f"weights are quantized; supported are {', '.join(DTYPES)}")


def _dtype(config: Json) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UnsupportedModel(f"dtype is {dtype!r}; supported are {', '.join(DTYPES)}")
    return str(dtype)


def _rope(config: Json, default_theta: float) -> RopeConfig:
    """From `rope_parameters`, or from the older `rope_theta` beside `rope_scaling`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise UnsupportedModel(f"rope parameters are {scaling!r}; an object is expected")
    rope_type = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModel(f"rope_type is {rope_type!r}; supported are {', '.join(ROPE_TYPES)}")
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor is {partial!r}; supported is 1")
    theta = _float(scaling if "rope_theta" in scaling else config, "rope_theta", default_theta)
    if rope_type == "default":
        return RopeConfig(theta)
    factor = _float(scaling, "factor")
    if rope_type == "linear":
        return RopeConfig(theta, rope_type, factor)
    low, high = _float(scaling, "low_freq_factor"), _float(scaling, "high_freq_factor")
    return RopeConfig(theta, rope_type, factor, low, high, _int(scaling, "original_max_position_embeddings"))


def _eos_token_ids(config: Json, generation: Json) -> tuple[int, ...]:
    """Ends of both files, in order: chat models often name theirs only in generation_config.json."""
    ids: dict[int, None] = {}
    for source in (config, generation):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int):
                ids[token_id] = None
    return tuple(ids)


def _int(config: Json, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"{key} is {value!r}; it must be an integer, 1 or more")
    return value


def _float(config: Json, key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UnsupportedModel(f"{key} is {value!r}; it must be a number above 0")
    return float(value)
