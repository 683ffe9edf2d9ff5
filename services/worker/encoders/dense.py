"""Dense modules of sentence-transformers: layers after the pooling."""

from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, SINGLE_FILE, decode_json, find_file
from shared.pooled.folder import MODULES_FILE

ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh}
PREFIX = "linear."


class _Module(msgspec.Struct):
    kind: str = msgspec.field(name="type")
    path: str = ""


class _Dense(msgspec.Struct):
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "Tanh"


def read_dense(folder: Path, hidden_size: int, *, is_dummy: bool) -> nn.Module | None:
    """The modules Dense of the folder in float32, or None. Raises ConfigError."""
    if not (folder / MODULES_FILE).is_file():
        return None
    modules = decode_json(folder / MODULES_FILE, list[_Module])
    paths = [folder / each.path for each in modules if each.kind.endswith(".Dense")]
    layers: list[nn.Module] = []
    size = hidden_size
    for path in paths:
        config = decode_json(find_file(path, CONFIG_FILE), _Dense)
        if config.in_features != size:
            raise ConfigError(f"model: {path}: in_features is {config.in_features}, not {size}")
        size = config.out_features
        layers += [_linear(path, config, is_dummy=is_dummy), _activation(path, config)]
    if size != hidden_size:
        raise ConfigError(
            f"model: {paths[-1]}: out_features is {size}; expected hidden_size, {hidden_size}"
        )
    return nn.Sequential(*layers).requires_grad_(requires_grad=False) if layers else None


def _linear(path: Path, config: _Dense, *, is_dummy: bool) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linear = nn.Linear(config.in_features, config.out_features, config.bias)
    if is_dummy:
        return linear
    file = find_file(path, SINGLE_FILE)
    try:
        tensors = load_file(file)
        linear.load_state_dict(
            {name.removeprefix(PREFIX): each.float() for name, each in tensors.items()}
        )
    except (RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model: {file}: {error}") from None
    return linear


def _activation(path: Path, config: _Dense) -> nn.Module:
    name = config.activation_function.rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"model: {path}: activation_function is {config.activation_function}; supported are"
            f" {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]()
