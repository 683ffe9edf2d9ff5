"""Reads config.json."""

from pathlib import Path
from typing import Any

import msgspec

from services.worker.config.frequencies import Rope, read_rope
from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, decode_json, find_file

DEFAULT_ROPE_THETA = 10000.0


class ModelConfig(msgspec.Struct, frozen=True):
    """The keys of config.json that we read, by their own names; the others are ignored."""

    architectures: list[str]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    num_kv_heads: int | None = msgspec.field(default=None, name="num_key_value_heads")
    head_size: int | None = msgspec.field(default=None, name="head_dim")
    hidden_act: str = "silu"
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    use_bias: bool = False
    use_sliding_window: bool = False
    num_nextn_predict_layers: int = 0
    quantization_config: msgspec.Raw | None = None

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        return self.num_kv_heads or self.num_attention_heads

    @property
    def rope(self) -> Rope:
        """Raises ValueError where its keys do not go together."""
        return read_rope(self.rope_values)

    @property
    def rope_values(self) -> dict[str, Any]:
        """The keys about rotary positions, which are in ``rope_parameters`` since transformers 5.

        Before, ``rope_scaling`` had some of them and the others were beside it.
        """
        nested = self.rope_scaling or self.rope_parameters or {}
        beside = {
            "rope_theta": self.rope_theta or DEFAULT_ROPE_THETA,
            "original_max_position_embeddings": self.max_position_embeddings,
            "partial_rotary_factor": self.partial_rotary_factor,
        }
        given = {key: value for key, value in nested.items() if value is not None}
        own = {"max_position_embeddings": self.max_position_embeddings}
        if self.original_max_position_embeddings is not None:
            own["original_max_position_embeddings"] = self.original_max_position_embeddings
        return beside | given | own

    def with_defaults(self, **values: Any) -> "ModelConfig":
        """Sets ``values`` that config.json leaves out, for which each family has defaults."""
        missing = {key: value for key, value in values.items() if getattr(self, key) is None}
        return msgspec.structs.replace(self, **missing)


def read_model_config(folder: Path) -> ModelConfig:
    """Raises ConfigError where the model needs what we cannot do."""
    path = find_file(folder, CONFIG_FILE)
    config = decode_json(path, ModelConfig)
    for problem in _unsupported(config):
        raise ConfigError(f"model: {path}: {problem}")
    return config


def _unsupported(config: ModelConfig) -> list[str]:
    problems = _rope_problems(config)
    if config.hidden_act != "silu":
        problems.append(f"hidden_act {config.hidden_act!r} is not supported; only 'silu' is")
    if config.use_sliding_window:
        problems.append("use_sliding_window is not supported")
    if config.quantization_config is not None:
        problems.append("quantized weights (quantization_config) are not supported")
    if config.num_attention_heads % config.num_key_value_heads:
        problems.append(
            f"num_attention_heads {config.num_attention_heads} is no multiple of"
            f" num_key_value_heads {config.num_key_value_heads}"
        )
    return problems


def _rope_problems(config: ModelConfig) -> list[str]:
    problems = []
    values = config.rope_values
    if values["partial_rotary_factor"] not in (None, 1.0):
        factor = values["partial_rotary_factor"]
        problems.append(f"partial_rotary_factor {factor} is not supported; only 1.0 is")
    for key, value in values.items():
        if isinstance(value, dict):
            problems.append(f"rope parameters of their own for {key!r} are not supported")
    try:
        read_rope(values)
    except ValueError as error:
        problems.append(str(error))
    if config.head_dim % 2:
        problems.append(f"head_dim {config.head_dim} is odd")
    return problems
