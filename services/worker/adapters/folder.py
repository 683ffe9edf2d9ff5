"""Reads adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import difflib
import logging
import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, deserialize
from torch import Tensor

from services.worker.adapters.sites import LoadedAdapter, LowRank
from shared.errors import ConfigError

log = logging.getLogger(__name__)

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PATTERN = re.compile(r"\^?(?:[\w\-|()]|\\\.|\.\*|\.|\\d\+)+\$?", re.ASCII)
MAX_PATTERN_CHARS, MAX_VARIABLE = 1000, 8
"""Expressions of names: any other one might take ages. ``MAX_VARIABLE`` groups and repetitions."""
PREFIX = "base_model.model."
TENSOR = re.compile(r"(?P<layer>.+)\.lora_(?P<which>[AB])\.weight")
INITIALISATIONS = {True, False, None, "gaussian", "eva", "orthogonal"}
"""Values of init_lora_weights that leave the base as it is."""
NEUTRAL = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern"),
    *("layers_to_transform", "lora_dropout", "megatron_config", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
    *("corda_config", "lora_ga_config", "loftq_config"),  # of a refused init_lora_weights
}
REFUSED = {
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias"),
    *("modules_to_save", "monteclora_config", "target_parameters", "trainable_token_indices"),
    *("use_bdlora", "use_dora", "use_qalora", "velora_config"),
}
RENAMES: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: name.replace("model.language_model.", "model.", 1),
    lambda name: name.replace("language_model.model.", "model.", 1),
    lambda name: f"model.{name}",
)
"""A file's names → the base's; the first that fits all names is taken."""

Shapes = Mapping[str, tuple[int, int]]
Number = TypeVar("Number", int, float)


class _Config(msgspec.Struct):
    """The keys that change the result."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    bias: str = "none"
    init_lora_weights: bool | str | None = True

    def rank_of(self, layer: str) -> int:
        return _matching(self.rank_pattern, layer, self.r)

    def scale_of(self, layer: str) -> float:
        rank, alpha = self.rank_of(layer), _matching(self.alpha_pattern, layer, self.lora_alpha)
        return alpha / (sqrt(rank) if self.use_rslora else rank)

    @property
    def facts(self) -> tuple[object, ...]:
        """All that the result depends on. The first expression that matches counts."""
        patterns = [*self.rank_pattern.items()], [*self.alpha_pattern.items()]
        return self.r, self.lora_alpha, self.use_rslora, *patterns


class _Pair(NamedTuple):
    """``layer`` is its name in the file."""

    layer: str
    a: Tensor
    b: Tensor


def read_adapter(
    name: str, folder: Path, shapes: Shapes, dtype: torch.dtype, max_rank: int
) -> LoadedAdapter:
    """The adapter in ``folder``, in ``dtype``. ``shapes`` are those of the layers that it may
    change. Its digest is of its ``name`` and of all that the result depends on. Raises ConfigError
    with the reason."""
    config = _read_config(name, folder)
    tensors = _read_tensors(folder, _most_bytes(shapes, max_rank))
    pairs = _find_pairs(tensors, shapes)
    for ours, pair in pairs.items():
        _check_shapes(pair, config.rank_of(pair.layer), shapes[ours], max_rank)
    layers = {
        ours: LowRank(
            _narrow(pair.a, dtype, pair.layer),
            _narrow(pair.b.float() * config.scale_of(pair.layer), dtype, pair.layer),
        )
        for ours, pair in pairs.items()
    }
    return LoadedAdapter(
        digest=_digest(name, config, tensors),
        rank=max(len(each.a) for each in layers.values()),
        num_bytes=sum(tensor.nbytes for each in layers.values() for tensor in each),
        layers=layers,
    )


def _read_config(name: str, folder: Path) -> _Config:
    path = folder / CONFIG
    if not folder.is_dir():
        raise ConfigError("there is no such folder")
    if not path.is_file():
        raise ConfigError(f"the folder has no {CONFIG}")
    if (num_bytes := path.stat().st_size) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{CONFIG} has {num_bytes} bytes; the limit is {MAX_CONFIG_BYTES}")
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        config = msgspec.convert(values, _Config)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{CONFIG}: {error}") from None
    _check_config(name, config, values)
    return config


def _check_config(name: str, config: _Config, values: Mapping[str, Any]) -> None:
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
    if unknown := sorted(given - NEUTRAL - {*_Config.__struct_fields__}):
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


def _most_bytes(shapes: Shapes, max_rank: int) -> int:
    """Of a file with float32 values of all layers, and its header."""
    return MAX_HEADER_BYTES + max_rank * 4 * sum(map(sum, shapes.values()))


def _read_tensors(folder: Path, most_bytes: int) -> dict[str, Tensor]:
    """Reads all of the file: a mapped one would end the process if it was cut off meanwhile."""
    path = folder / WEIGHTS
    if not path.is_file():
        has_pickle = (folder / PICKLED).is_file()
        hint = f"; {PICKLED} is not read, since it may run code" if has_pickle else ""
        raise ConfigError(f"the folder has no {WEIGHTS}{hint}")
    if (num_bytes := path.stat().st_size) > most_bytes:
        raise ConfigError(
            f"{WEIGHTS} has {num_bytes} bytes; with max-lora-rank it has at most {most_bytes}"
        )
    try:
        stored = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ConfigError(f"{WEIGHTS} is no good safetensors file: {error}") from None
    return {name: _tensor(name, **fields) for name, fields in stored}


def _tensor(name: str, dtype: str, shape: list[int], data: bytearray) -> Tensor:
    if dtype not in DTYPES:
        raise ConfigError(f"tensor {name} is {dtype}; {', '.join(DTYPES)} are supported")
    if 0 in shape:
        raise ConfigError(f"tensor {name} is {shape}: it is empty")
    return torch.frombuffer(data, dtype=DTYPES[dtype]).reshape(shape)


def _digest(name: str, config: _Config, tensors: Mapping[str, Tensor]) -> str:
    digest = blake2b(msgspec.msgpack.encode((name, *config.facts)), digest_size=16)
    for key, tensor in sorted(tensors.items()):
        digest.update(msgspec.msgpack.encode((key, str(tensor.dtype), list(tensor.shape))))
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _find_pairs(tensors: Mapping[str, Tensor], shapes: Shapes) -> dict[str, _Pair]:
    """A and B by our names of layers. Every tensor is used, or its name is in the error."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        match = TENSOR.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            raise ConfigError(f"tensor {name} is not supported; lora_A and lora_B of layers are")
        found.setdefault(match["layer"], {})[match["which"]] = tensor
    if not found:
        raise ConfigError(f"{WEIGHTS} has no tensors")
    for layer, pair in found.items():
        if missing := {"A", "B"} - pair.keys():
            raise ConfigError(f"layer {layer} has no lora_{missing.pop()}")
    rename = next((each for each in RENAMES if all(each(layer) in shapes for layer in found)), None)
    if rename is None:
        raise ConfigError(_unknown_layer(found, shapes))
    return {rename(layer): _Pair(layer, pair["A"], pair["B"]) for layer, pair in found.items()}


def _unknown_layer(layers: Mapping[str, object], shapes: Shapes) -> str:
    def num_known(rename: Callable[[str], str]) -> int:
        return sum(rename(layer) in shapes for layer in layers)

    rename = max(RENAMES, key=num_known)
    unknown = next(layer for layer in layers if rename(layer) not in shapes)
    nearest = difflib.get_close_matches(rename(unknown), shapes, n=1, cutoff=0.0)
    return (
        f"layer {unknown} is not one of the model's that adapters may change; the nearest is"
        f" {nearest[0]}"
    )


def _check_shapes(pair: _Pair, rank: int, shape: tuple[int, int], max_rank: int) -> None:
    outputs, inputs = shape
    if rank > max_rank:
        raise ConfigError(f"rank {rank} of layer {pair.layer}; max-lora-rank is {max_rank}")
    for which, tensor, expected in (
        ("A", pair.a, [rank, inputs]),
        ("B", pair.b, [outputs, rank]),
    ):
        tensor_name = f"{pair.layer}.lora_{which}.weight"
        if list(tensor.shape) != expected:
            raise ConfigError(f"tensor {tensor_name} is {list(tensor.shape)}, expected {expected}")


def _narrow(tensor: Tensor, dtype: torch.dtype, layer: str) -> Tensor:
    narrow = tensor.to(dtype)
    if not narrow.isfinite().all():
        raise ConfigError(f"layer {layer}: values that are not finite in {dtype}")
    return narrow


def _matching(pattern: Mapping[str, Number], layer: str, default: Number) -> Number:
    for each, value in pattern.items():
        if _expression(each).match(layer):
            return value
    return default
