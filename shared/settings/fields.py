"""The types of settings: parsing and validation."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, SecretStr
from pydantic_settings import NoDecode

from shared.link.endpoint import check_dialled, check_host, check_listened
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.json_object import read_object
from shared.settings.known import NAMES
from shared.wire.messages import WorkerRole

API_KEY = r"[!-~]{1,256}"
MAX_WORKERS = 64
NUM_TOKENS = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)([kmKM])")
UNITS = {"k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}


def _split(value: Any) -> Any:
    """Splits text: a JSON list, or parts separated by commas; a file may have a list."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.startswith("[") else value.split(",")
    except RecursionError:
        raise ValueError("expected a JSON list of texts or numbers") from None


def check_api_key(key: SecretStr) -> SecretStr:
    """Raises ValueError without quoting the key."""
    if not re.fullmatch(API_KEY, key.get_secret_value()):
        raise ValueError("expected 1 to 256 printable ASCII characters, no space")
    return key


def _path_as_text(value: Any) -> Any:
    """Accepts a ``Path`` from Python code."""
    return str(value) if isinstance(value, Path) else value


def _check_origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"https?://[^/\s]+", text):
        raise ValueError("expected *, or an origin such as https://page.example")
    return text


def _check_host_name(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[\w.-]+", text, re.ASCII):
        raise ValueError("expected *, or a name such as models.example, without a port")
    return text


def _split_sizes(value: Any) -> Any:
    """Reads a number as a list of one, and empty text as an empty list."""
    if isinstance(value, int):
        return [value]
    return [] if value == "" else _split(value)


def _check_num_workers(value: Any) -> Any:
    """Gives one error instead of one for each allowed type."""
    number = int(value) if str(value).isdecimal() else 0
    if value != "auto" and not 1 <= number <= MAX_WORKERS:
        raise ValueError(f"expected an integer from 1 to {MAX_WORKERS}, or auto")
    return value


def _values_of(setting: str) -> BeforeValidator:
    """Reads the values of other servers too."""
    return BeforeValidator(partial(NAMES.value, setting))


def _read_tokens(value: Any) -> Any:
    """Reads 32k as 32,000 and 32K as 32,768, like vLLM; auto, -1 and llama.cpp's 0 as None."""
    if value in ("auto", "-1", -1, "0", 0):
        return None
    match = NUM_TOKENS.fullmatch(value) if isinstance(value, str) else None
    return int(float(match[1]) * UNITS[match[2]]) if match else value


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]
Sizes = Annotated[list[PositiveInt], Field(min_length=1), NoDecode, BeforeValidator(_split_sizes)]
NumWorkers = Annotated[
    Annotated[int, Field(ge=1, le=MAX_WORKERS)] | Literal["auto"],
    BeforeValidator(_check_num_workers),
]
WeightForm = Annotated[
    Literal["none", "wint8", "wint4", "nf4", "fp8", "fp8_block"],
    _values_of("quantization"),
]
Role = Annotated[WorkerRole, _values_of("worker_role")]
Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], _values_of("dtype")]
LoadFormat = Annotated[Literal["auto", "safetensors", "dummy"], _values_of("load_format")]
JsonObject = Annotated[dict[str, Any], NoDecode, BeforeValidator(read_object)]
NumTokens = Annotated[int | None, BeforeValidator(_read_tokens)]
KVCacheDtype = Annotated[Literal["auto", "none", "int8", "fp8"], _values_of("kv_cache_dtype")]
Model = Annotated[str, BeforeValidator(_path_as_text)]
HostName = Annotated[str, AfterValidator(check_host)]
ListenAddress = Annotated[str, AfterValidator(check_listened)]
ApiKey = Annotated[SecretStr, AfterValidator(check_api_key)]
ApiKeys = Annotated[list[ApiKey], NoDecode, BeforeValidator(_split)]
Origins = Annotated[
    list[Annotated[str, AfterValidator(_check_origin)]], NoDecode, BeforeValidator(_split)
]
HostNames = Annotated[
    list[Annotated[str, AfterValidator(_check_host_name)]], NoDecode, BeforeValidator(_split)
]
Addresses = Annotated[
    list[Annotated[str, AfterValidator(check_dialled)]], NoDecode, BeforeValidator(_split)
]


LISTEN_ADDRESS = Field(
    None,
    description="address for services on other machines, tcp://HOST or tcp://HOST:PORT; HOST is"
    " an address, an interface or * (default ports: tokenizer 5570, scheduler 5571 and 5572)",
)
SCHEDULER_ADDRESS: list[str] = Field(
    [],
    description="schedulers on other machines, tcp://HOST or tcp://HOST:PORT; every address of a"
    " name is dialled (default ports: 5571, workers 5572)",
)
MODEL = Field(
    str(EMBEDDED_MODEL),
    description="a Hugging Face folder, GGUF file, or org/name[@revision] in the Hugging Face"
    " cache; nothing is downloaded",
)
MAX_MODEL_LEN = Field(
    None, gt=0, description="longest prompt plus output, in tokens (default: the model's)"
)
MAX_OPEN_REQUESTS = Field(4096, gt=0, description="open requests; above it 429")
