"""The formats of tools that quantize models, read into our forms of weights."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from services.worker.weights.schemes.awq import Awq
from services.worker.weights.schemes.bitsandbytes import BitsAndBytes
from services.worker.weights.schemes.compressed_tensors import CompressedTensors
from services.worker.weights.schemes.fp8 import Fp8
from services.worker.weights.schemes.gptq import Gptq
from services.worker.weights.schemes.mxfp4 import Mxfp4
from services.worker.weights.schemes.scheme import Scheme
from shared.errors import ConfigError

SCHEMES: dict[str, type[Scheme]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
# Modules with a ``SCHEME``, of optional parts.
OTHERS: dict[str, str] = {
    "gguf": "services.worker.gguf.scheme",
}


def find_scheme(config: Mapping[str, Any]) -> Scheme:
    """``config`` is a model's quantization_config. Raises ConfigError for an unreadable method,
    with the readable ones."""
    method = config.get("quant_method")
    if method not in SCHEMES.keys() | OTHERS.keys():
        raise ConfigError(
            f"model: quantization_config: quant_method {method!r} is not supported; supported are"
            f" {', '.join(sorted(SCHEMES))}"
        )
    kind = SCHEMES[method] if method in SCHEMES else import_module(OTHERS[method]).SCHEME
    try:
        scheme: Scheme = kind(config)
        return scheme
    except ValueError as error:
        raise ConfigError(f"model: quantization_config: {method}: {error}") from None
