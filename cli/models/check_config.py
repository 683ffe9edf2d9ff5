"""Checks from its config alone that a worker could serve a model; no weight is read."""

from pathlib import Path
from typing import Literal, NamedTuple

import torch

from services.worker.models.registry import MODELS, read_architectures, read_model_config
from services.worker.startup.implementations import implementation
from services.worker.startup.model_shape import count_parameters
from services.worker.weights.load import build_model
from services.worker.weights.schemes import find_scheme
from shared.errors import ConfigError
from shared.pooling import encodes, read_served_model
from shared.wire.messages import ModelInfo


class Servable(NamedTuple):
    """``backend`` would compute the model; ``parameters`` 0: not known."""

    backend: Literal["shoal", "transformers"]
    architecture: str
    parameters: int
    model: ModelInfo


def check_config(folder: Path) -> Servable:
    """Raises ConfigError if it could not."""
    model = read_served_model(folder, [], None)
    pools = model.pooling is not None
    architectures = read_architectures(folder, pools)
    name = "/".join(architectures)
    if encodes(architectures) or (MODELS.keys().isdisjoint(architectures) and not pools):
        _check_transformers(folder, name, model.max_model_len, pools)
        return Servable("transformers", name, 0, model)
    config = read_model_config(folder, pools)
    if config.quantization_config:
        find_scheme(config.quantization_config)
    built = build_model(config, torch.bfloat16, torch.device("meta"), pools=pools)
    return Servable("shoal", name, count_parameters(built).total, model)


def _check_transformers(folder: Path, name: str, max_model_len: int, pools: bool) -> None:
    transformers = implementation("encoders" if pools else "transformers")
    if transformers is None or not transformers.can_serve(folder, max_model_len):
        raise ConfigError(
            f"model: {name} is none of our own architectures, and transformers' cannot be served"
        )
