"""The types of settings: how each is read from text, and what it may be."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, SecretStr
from pydantic_settings import NoDecode

from shared.link.endpoint import check_dialled, check_host, check_listened

API_KEY = r"[!-~]{1,256}"
MIN_REASONING_KEY_CHARS = 32
MAX_WORKERS = 64
WEIGHT_SYNONYMS = {  # vLLM's and FastDeploy's
    "bitsandbytes": "nf4",
    "block_wise_fp8": "fp8_block",
    "fp8_per_block": "fp8_block",
    "fp8_per_channel": "fp8",
    "int8_per_channel_weight_only": "wint8",
}
CACHE_SYNONYMS = {  # vLLM's; all of ours have a scale for each token and head
    "int8_per_token_head": "int8",
    "fp8_e4m3": "fp8",
    "fp8_per_token_head": "fp8",
}


def _split(value: Any) -> Any:
    """Splits text, which is a JSON list or has commas between its parts; a file may have a list."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.startswith("[") else value.split(",")


def check_api_key(key: SecretStr) -> SecretStr:
    """Raises ValueError, whose text does not quote the key."""
    if not re.fullmatch(API_KEY, key.get_secret_value()):
        raise ValueError("expected 1 to 256 printable ASCII characters, no space")
    return key


def _check_reasoning_key(key: SecretStr) -> SecretStr:
    """Raises ValueError, whose text does not quote the key."""
    if len(key.get_secret_value()) < MIN_REASONING_KEY_CHARS:
        raise ValueError(f"expected {MIN_REASONING_KEY_CHARS} characters or more")
    return key


def _path_as_text(value: Any) -> Any:
    """Lets programs give a folder as a ``Path``."""
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
    """Reads a number alone as a list of one, and empty text as an empty list."""
    if isinstance(value, int):
        return [value]
    return [] if value == "" else _split(value)


def _check_num_workers(value: Any) -> Any:
    """One error in place of one for each kind that it may be."""
    number = int(value) if str(value).isdecimal() else 0
    if value != "auto" and not 1 <= number <= MAX_WORKERS:
        raise ValueError(f"expected a whole number from 1 to {MAX_WORKERS}, or auto")
    return value


def _names_of(synonyms: Mapping[str, str]) -> BeforeValidator:
    return BeforeValidator(
        lambda value: synonyms.get(value, value) if isinstance(value, str) else value
    )


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]
Sizes = Annotated[list[PositiveInt], Field(min_length=1), NoDecode, BeforeValidator(_split_sizes)]
NumWorkers = Annotated[
    Annotated[int, Field(ge=1, le=MAX_WORKERS)] | Literal["auto"],
    BeforeValidator(_check_num_workers),
]
WeightForm = Annotated[
    Literal["none", "wint8", "wint4", "nf4", "fp8", "fp8_block"], _names_of(WEIGHT_SYNONYMS)
]
KVCacheDtype = Annotated[Literal["auto", "none", "int8", "fp8"], _names_of(CACHE_SYNONYMS)]
Model = Annotated[str, BeforeValidator(_path_as_text)]
HostName = Annotated[str, AfterValidator(check_host)]
ListenAddress = Annotated[str, AfterValidator(check_listened)]
ApiKey = Annotated[SecretStr, AfterValidator(check_api_key)]
ReasoningKey = Annotated[SecretStr, AfterValidator(_check_reasoning_key)]
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
