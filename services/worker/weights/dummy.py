"""Random weights of the right shapes, to measure a model without its weights."""

import logging
from collections.abc import Mapping

import torch
from torch import nn

from services.worker.config.model_config import ModelConfig
from services.worker.layers.embedding import LMHead, TokenRows
from services.worker.layers.linear import Linear
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models.decoder import DecoderLM
from services.worker.weights.load import build_model, quantize
from services.worker.weights.online import Forms, Quantization
from services.worker.weights.weight_placement import make_placement
from shared.errors import ConfigError

log = logging.getLogger(__name__)

SEED = 0
STD = 0.02  # as models are initialised for training: no layer's output overflows


def make_dummy(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
    host_bytes: int = 0,
    *,
    head: Quantization = "none",
    embedding: Quantization = "none",
    pools: bool = False,
    parallel: Parallel = ALONE,
) -> DecoderLM:
    """The model of ``config`` with normal noise in its matrices, ones in its norms and zeros in its
    biases; the same for every worker on the same kind of device, but ranks have other noise than
    one worker alone. At least ``host_bytes`` of them, or all if there are fewer, are in host
    memory. Raises ConfigError if the model's weights are quantized."""
    if config.quantization_config:
        raise ConfigError(
            "load-format: dummy makes dense weights; the model has a quantization_config: take it"
            " away and use quantization"
        )
    is_tied = bool(config.tie_word_embeddings)
    forms = Forms(quantization, head, embedding).tied(is_tied)
    log.warning("load-format = dummy: the weights are random, the output is not meaningful")
    model = build_model(config, dtype, device, parallel, pools=pools)
    model.drop_remote()
    generator = torch.Generator(device).manual_seed(SEED)
    table = model.model.embed_tokens
    for module in model.modules():
        if isinstance(module, LMHead) and is_tied and module.can_have(table.weight):
            module.weight = table.weight
        elif isinstance(module, TokenRows) and module.is_here:
            module.allocate(device)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    of_linears = {parameter for linear in linears for parameter in linear.parameters()}
    others = {each: name for name, each in model.named_parameters() if each not in of_linears}
    _make_up(others, generator)
    placement = make_placement(model, device, model.model.layers, host_bytes)
    for _, module, home in placement.visit():
        if isinstance(module, Linear):
            module.allocate(device)
            _make_up({each: name for name, each in module.named_parameters()}, generator)
            if not module.is_empty:
                quantize(module, forms.linear)
            module.weight.to(home)
        elif isinstance(module, LMHead) and is_tied and forms.head == embedding != "none":
            module.weight = table.weight
        elif isinstance(module, TokenRows) and module.is_here:
            quantize(module, forms.of(module))
    model.offloaded = placement.offloaded()
    return model


def _make_up(parameters: Mapping[nn.Parameter, str], generator: torch.Generator) -> None:
    for parameter, name in parameters.items():
        if parameter.ndim > 1:
            parameter.normal_(0, STD, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
