"""The formats of tools that quantize models, read into our forms of weights."""

from collections.abc import Mapping
from typing import Any

from services.worker.weights.schemes.scheme import Scheme
from services.worker.weights.schemes.tools.awq import Awq
from services.worker.weights.schemes.tools.bitsandbytes import BitsAndBytes
from services.worker.weights.schemes.tools.compressed_tensors import CompressedTensors
from services.worker.weights.schemes.tools.fp8 import Fp8
from services.worker.weights.schemes.tools.gptq import Gptq
from services.worker.weights.schemes.tools.mxfp4 import Mxfp4
from shared.errors import ConfigError

SCHEMES: list[type[Scheme]] = [
    Awq,
    BitsAndBytes,
    CompressedTensors,
    Fp8,
    Gptq,
    Mxfp4,
]


def find_scheme(config: Mapping[str, Any]) -> Scheme:
    """``config`` is a model's quantization_config. Raises ConfigError for an unreadable method,
    with the readable ones."""
    method, schemes = config.get("quant_method"), {each.method: each for each in SCHEMES}
    if method not in schemes:
        raise ConfigError(
            f"model: quantization_config: quant_method {method!r} is not supported; supported are"
            f" {', '.join(sorted(schemes))}"
        )
    try:
        return schemes[method](config)
    except ValueError as error:
        raise ConfigError(f"model: quantization_config: {method}: {error}") from None
