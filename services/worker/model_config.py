"""What config.json and generation_config.json say about the model."""

from pathlib import Path

import msgspec

from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, decode_json, find_file

GENERATION_CONFIG_FILE = "generation_config.json"


class RopeParameters(msgspec.Struct, frozen=True):
    """``rope_type`` was ``type`` once; ``rope_theta`` lies here since transformers 5."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None


class ModelConfig(msgspec.Struct, frozen=True):
    """The keys of config.json that we read, by their own names; the others are ignored."""

    architectures: list[str]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    head_size: int | None = msgspec.field(default=None, name="head_dim")
    hidden_act: str = "silu"
    rope_theta: float | None = None
    rope_parameters: RopeParameters | None = None
    rope_scaling: RopeParameters | None = None
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    num_nextn_predict_layers: int = 0
    eos_token_id: int | list[int] | None = None
    quantization_config: msgspec.Raw | None = None

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def rotary_base(self) -> float:
        nested = self.rope_parameters.rope_theta if self.rope_parameters else None
        return nested or self.rope_theta or 10000.0


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def read_model_config(folder: Path) -> ModelConfig:
    """Raises ConfigError where the model needs what we cannot do."""
    path = find_file(folder, CONFIG_FILE)
    config = decode_json(path, ModelConfig)
    for problem in _unsupported(config):
        raise ConfigError(f"model: {path}: {problem}")
    return config


def read_eos_ids(folder: Path, config: ModelConfig) -> list[int]:
    """The ids that end a text: those of generation_config.json and of config.json.

    Some models name ids that they do not have, such as −1 for none.
    """
    ids = _as_set(config.eos_token_id)
    if (folder / GENERATION_CONFIG_FILE).is_file():
        generation = decode_json(folder / GENERATION_CONFIG_FILE, _GenerationConfig)
        ids |= _as_set(generation.eos_token_id)
    return sorted(ids & set(range(config.vocab_size)))


def _as_set(ids: int | list[int] | None) -> set[int]:
    if ids is None:
        return set()
    return {ids} if isinstance(ids, int) else set(ids)


def _unsupported(config: ModelConfig) -> list[str]:
    problems = []
    for rope in (config.rope_parameters, config.rope_scaling):
        kind = rope and (rope.rope_type or rope.type)
        if kind not in (None, "default"):
            problems.append(f"rope type {kind!r} is not supported; only 'default' is")
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
