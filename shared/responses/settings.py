"""Settings of the Responses API."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from shared.settings.base import Settings

MIN_REASONING_KEY_CHARS = 32


def _check_reasoning_key(key: SecretStr) -> SecretStr:
    """Raises ValueError without quoting the key."""
    if len(key.get_secret_value()) < MIN_REASONING_KEY_CHARS:
        raise ValueError(f"expected {MIN_REASONING_KEY_CHARS} characters or more")
    return key


class ResponseSettings(Settings):
    """Of a gateway."""

    response_store: Path | None = Field(
        None,
        description="SQLite file for the responses of /v1/responses, shared by the gateways of"
        " one machine (default: none are stored; `shoal serve`: one that ends with it)",
    )
    response_store_bytes: int = Field(
        256 << 20, ge=0, description="most bytes of stored responses and their input; 0: no store"
    )
    response_store_age_s: float = Field(
        7 * 24 * 3600.0, gt=0, description="seconds until a stored response expires"
    )
    max_background_responses: int = Field(
        64,
        gt=0,
        description="background responses of an API key, running or queued, and twice that for"
        " all keys; above it 429",
    )
    reasoning_key: Annotated[SecretStr, AfterValidator(_check_reasoning_key)] | None = Field(
        None,
        description="secret that encrypts reasoning for stateless clients, the same for all"
        " gateways; prefer the environment over a flag (default: one per process)",
    )
