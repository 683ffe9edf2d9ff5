"""Keys that clients must show, as OpenAI's do: ``Authorization: Bearer KEY``."""

import hmac
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from pydantic import SecretStr

from services.gateway.routes import route_of
from shared.config import GatewayConfig, check_api_key
from shared.errors import ConfigError, Unauthorized

OPEN_ROUTES = {"/health", "/ready", "/ping"}
"""For whoever watches over the server and has no key."""


class Guard:
    """Compares digests: all have one length, and the time it takes tells nothing of a key."""

    def __init__(self, keys: Iterable[SecretStr]) -> None:
        self._digests = [sha256(key.get_secret_value().encode()).digest() for key in keys]

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises Unauthorized, with the body unread."""
        if route_of(request) not in OPEN_ROUTES and not self._knows(_shown_key(request)):
            raise Unauthorized("the API key is not one of this server's")
        return await handler(request)

    def _knows(self, key: bytes) -> bool:
        digest = sha256(key).digest()
        return sum(hmac.compare_digest(digest, each) for each in self._digests) > 0


def _shown_key(request: web.Request) -> bytes:
    """Raises Unauthorized where there is none. May hold any bytes."""
    scheme, _, key = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthorized("this server needs an API key; expected Authorization: Bearer KEY")
    return key.strip().encode(errors="surrogateescape")


def load_api_keys(config: GatewayConfig) -> list[SecretStr]:
    """Those of the settings and those of the file; none: everybody may ask. Raises ConfigError."""
    path = config.api_key_file
    return [*config.api_key, *(_read_keys(path) if path is not None else [])]


def _read_keys(path: Path) -> list[SecretStr]:
    try:
        lines = path.read_text("utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ConfigError(f"api-key-file: {path}: {error.strerror}") from None
    keys = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            keys.append(_checked(line, f"{path}, line {number}"))
    if not keys:
        raise ConfigError(f"api-key-file: {path} holds no key; remove the setting to serve without")
    return keys


def _checked(line: str, where: str) -> SecretStr:
    try:
        return check_api_key(SecretStr(line))
    except ValueError as error:
        raise ConfigError(f"api-key-file: {where}: {error}") from None
