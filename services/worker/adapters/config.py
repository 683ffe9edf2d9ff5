"""Reads adapter_config.json of PEFT."""

import logging
import re
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.errors import ConfigError

log = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
PATTERN = re.compile(r"\^?(?:[\w\-|()]|\\\.|\.\*|\.|\\d\+)+\$?", re.ASCII)
MAX_PATTERN_CHARS, MAX_VARIABLE = 1000, 8
"""Expressions of names: any other one might take ages. ``MAX_VARIABLE`` groups and repetitions."""
INITIALISATIONS = {True, False, None, "gaussian", "eva", "orthogonal"}
"""Values of init_lora_weights that leave the base as it is."""
NEUTRAL = {
    *("auto_mapping", "base_model_name_or_path", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern"),
    *("layers_to_transform", "lora_dropout", "megatron_config", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
    *("corda_config", "lora_ga_config", "loftq_config"),  # of a refused init_lora_weights
}
REFUSED = {
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias"),
    *("modules_to_save", "monteclora_config", "trainable_token_indices", "use_bdlora"),
    *("use_dora", "use_qalora", "velora_config"),
}

Number = TypeVar("Number", int, float)


class AdapterConfig(msgspec.Struct):
    """The keys that change the result."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    ensure_weight_tying: bool = False
    target_parameters: list[str] | None = None

    def rank_of(self, layer: str) -> int:
        return _matching(self.rank_pattern, layer, self.r)

    def scale_of(self, layer: str) -> float:
        rank, alpha = self.rank_of(layer), _matching(self.alpha_pattern, layer, self.lora_alpha)
        return alpha / (sqrt(rank) if self.use_rslora else rank)

    def is_targeted(self, parameter: str) -> bool:
        return f".{parameter}".endswith(tuple(f".{each}" for each in self.target_parameters or ()))

    @property
    def facts(self) -> tuple[object, ...]:
        """All that the result depends on. The first expression that matches counts."""
        patterns = [*self.rank_pattern.items()], [*self.alpha_pattern.items()]
        return self.r, self.lora_alpha, self.use_rslora, *patterns


def read_config(name: str, folder: Path) -> AdapterConfig:
    path = folder / CONFIG
    if not folder.is_dir():
        raise ConfigError("there is no such folder")
    if not path.is_file():
        raise ConfigError(f"the folder has no {CONFIG}")
    if (num_bytes := path.stat().st_size) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{CONFIG} has {num_bytes} bytes; the limit is {MAX_CONFIG_BYTES}")
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        config = msgspec.convert(values, AdapterConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{CONFIG}: {error}") from None
    _check_config(name, config, values)
    return config


def _check_config(name: str, config: AdapterConfig, values: Mapping[str, Any]) -> None:
    if config.peft_type != "LORA":
        raise ConfigError(f"{CONFIG}: peft_type {config.peft_type} is not supported; LORA is")
    if config.bias != "none":
        raise ConfigError(f"{CONFIG}: bias {config.bias} is not supported; none is")
    if (init := config.init_lora_weights) not in INITIALISATIONS:
        raise ConfigError(f"{CONFIG}: init_lora_weights {init} changes the base's weights")
    for key in ("r", *config.rank_pattern):
        rank = config.rank_pattern.get(key, config.r)
        if rank < 1:
            raise ConfigError(f"{CONFIG}: rank {rank} of {key}; at least 1 is needed")
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        _check_pattern(pattern)
    given = {key for key, value in values.items() if value not in (None, False, "", [], {})}
    if refused := sorted(given & REFUSED):
        raise ConfigError(f"{CONFIG}: {', '.join(refused)}: not supported")
    if unknown := sorted(given - NEUTRAL - {*AdapterConfig.__struct_fields__}):
        log.warning("adapter %s: %s: no effect here: %s", name, CONFIG, ", ".join(unknown))


def _check_pattern(pattern: str) -> None:
    num_variable = sum(map(pattern.count, ("(", ".*", "+")))
    is_simple = len(pattern) <= MAX_PATTERN_CHARS and num_variable <= MAX_VARIABLE
    if not is_simple or not PATTERN.fullmatch(pattern):
        raise ConfigError(
            f"{CONFIG}: {pattern[:60]!r} is not supported; patterns have names, dots, alternatives"
            f" (a|b), .* and \\d+, and at most {MAX_VARIABLE} of the last three"
        )
    try:
        _expression(pattern)
    except re.error as error:
        raise ConfigError(f"{CONFIG}: {pattern!r} is no expression: {error}") from None


def _expression(pattern: str) -> re.Pattern[str]:
    """PEFT's: the pattern matches the end of a name, from a dot on."""
    return re.compile(rf"(.*\.)?({pattern})$")


def _matching(pattern: Mapping[str, Number], layer: str, default: Number) -> Number:
    for each, value in pattern.items():
        if _expression(each).match(layer):
            return value
    return default
