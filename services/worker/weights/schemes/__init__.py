"""The formats of tools that quantize models, read into our forms of weights."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from services.worker.weights.schemes.scheme import Scheme
from shared.errors import ConfigError

# Modules with a ``SCHEME``, by ``quant_method``.
SCHEMES: dict[str, str] = {
    "awq": "services.worker.weights.schemes.tools.awq",
    "bitsandbytes": "services.worker.weights.schemes.tools.bitsandbytes",
    "compressed-tensors": "services.worker.weights.schemes.tools.compressed_tensors",
    "fp8": "services.worker.weights.schemes.tools.fp8",
    "gguf": "services.worker.gguf.scheme",
    "gptq": "services.worker.weights.schemes.tools.gptq",
    "modelopt": "services.worker.weights.schemes.tools.modelopt",
    "mxfp4": "services.worker.weights.schemes.tools.mxfp4",
    "mxfp8": "services.worker.weights.schemes.tools.fp8",
    "quark": "services.worker.weights.schemes.tools.quark",
    "torchao": "services.worker.weights.schemes.tools.torchao",
}


def find_scheme(config: Mapping[str, Any]) -> Scheme:
    """``config`` is a model's quantization_config. Raises ConfigError for an unreadable method,
    with the readable ones."""
    method = config.get("quant_method")
    if method not in SCHEMES:
        raise ConfigError(
            f"model: quantization_config: quant_method {method!r} is not supported; supported are"
            f" {', '.join(sorted(SCHEMES))}"
        )
    try:
        return cast(Scheme, import_module(SCHEMES[method]).SCHEME(config))
    except ValueError as error:
        raise ConfigError(f"model: quantization_config: {method}: {error}") from None
