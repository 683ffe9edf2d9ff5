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

SCHEMES: dict[str, type[Scheme]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
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
        return SCHEMES[method](config)
    except ValueError as error:
        raise ConfigError(f"model: quantization_config: {method}: {error}") from None
