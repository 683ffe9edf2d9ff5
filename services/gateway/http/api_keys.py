"""API keys of clients, as OpenAI's or Anthropic's clients send them: ``Authorization: Bearer KEY``
or ``x-api-key: KEY``."""

import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from pydantic import SecretStr

from services.gateway.http.account import ACCOUNT, Account, KeyLimits
from services.gateway.http.fair_time import FairTurns
from services.gateway.http.internal_socket import OWNER_HEADER, is_own
from services.gateway.http.routes import Load, route_of
from shared.errors import ConfigError, Unauthorized
from shared.settings.fields import check_api_key
from shared.settings.gateway import GatewayConfig
from shared.wire.envelope import MAX_PROMISE_MS

API_KEY = "X-Api-Key"
MAX_SHOWN = 2
"""Keys of one request: some clients send two, one of them a placeholder."""

_COUNT = re.compile("[1-9][0-9]{0,17}")
_TIME_MS = re.compile(r"[0-9]{1,8}(\.[0-9]{1,6})?")


class Guard:
    """Compares digests: all have the same length, so the time of a comparison reveals nothing of a
    key. The gateway's own requests, on ``internal_socket``, have no key and name their owner.
    Routes without an entry in ``loads`` are work."""

    def __init__(
        self, accounts: Sequence[Account], loads: Mapping[str, Load], internal_socket: Path
    ) -> None:
        self._accounts = accounts
        self._loads = loads
        self._internal_socket = internal_socket
        self._turns = FairTurns()

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises Unauthorized, and Overloaded at a limit of the key, with the body unread."""
        load = self._loads.get(route_of(request), Load.WORK)
        if load is Load.OPEN:
            return await handler(request)
        if is_own(request, self._internal_socket):
            account = self._owner(request.headers.get(OWNER_HEADER, ""))
        else:
            account = self._account(shown_keys(request))
        request[ACCOUNT] = account
        return await self._turns.run(account.key_id, _handled(request, handler, account, load))

    def _account(self, keys: Sequence[bytes]) -> Account:
        """The account of any of ``keys``."""
        digests = [sha256(key).digest() for key in keys]
        pairs = [(digest, account) for digest in digests for account in self._accounts]
        found = [each for digest, each in pairs if hmac.compare_digest(digest, each.digest)]
        if not found:
            raise Unauthorized("the API key is not one of this server's")
        return found[0]

    def _owner(self, key_id: str) -> Account:
        for each in self._accounts:
            if each.key_id == key_id:
                return each
        raise Unauthorized("the API key for which this was asked is gone")


async def _handled(
    request: web.Request, handler: Handler, account: Account, load: Load
) -> web.StreamResponse:
    if load is Load.CHEAP:
        return await handler(request)
    with account.request(generates=load is Load.GENERATION):
        return await handler(request)


def shown_keys(request: web.Request) -> list[bytes]:
    """Raises Unauthorized without a key, or with too many, as in guessing. Keys may contain any
    bytes."""
    scheme, _, bearer = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    keys = [bearer] if scheme.lower() == "bearer" else []
    keys += request.headers.getall(API_KEY, [])
    if not keys:
        raise Unauthorized(
            "this server needs an API key; expected Authorization: Bearer KEY, or x-api-key: KEY"
        )
    if len(keys) > MAX_SHOWN:
        raise Unauthorized(f"the request shows {len(keys)} API keys; the limit is {MAX_SHOWN}")
    return [key.strip().encode(errors="surrogateescape") for key in keys]


def load_accounts(config: GatewayConfig) -> list[Account]:
    """The accounts of the keys in the file and in the settings; without any, requests need no key.
    Raises ConfigError."""
    path = config.api_key_file
    limits = KeyLimits(
        max_open_requests=config.max_open_requests_per_key,
        max_tokens_per_minute=config.max_tokens_per_minute_per_key,
        ttft_ms=config.ttft_ms,
        tpot_ms=config.tpot_ms,
    )
    accounts = _read_accounts(path, limits) if path is not None else []
    return accounts + [Account(key, limits) for key in config.api_key]


def _read_accounts(path: Path, limits: KeyLimits) -> list[Account]:
    """``limits`` apply to keys without limits of their own in the file."""
    try:
        lines = path.read_text("utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ConfigError(f"api-key-file: {path}: {error.strerror}") from None
    accounts: dict[bytes, Account] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            try:
                account = _account_of(line, limits)
                if account.digest in accounts:
                    raise ValueError("an earlier line has the same key; expected one line a key")
            except ValueError as error:
                raise ConfigError(f"api-key-file: {path}, line {number}: {error}") from None
            accounts[account.digest] = account
    if not accounts:
        raise ConfigError(f"api-key-file: {path} holds no key; remove the setting to serve without")
    return [*accounts.values()]


def _account_of(line: str, limits: KeyLimits) -> Account:
    """Raises ValueError; its text does not contain the key."""
    key, *words = line.split()
    own = dict(map(_limit_of, words))
    return Account(check_api_key(SecretStr(key)), replace(limits, **own))


def _limit_of(word: str) -> tuple[str, Any]:
    """A field of KeyLimits and its value. Raises ValueError."""
    name, _, value = word.partition("=")
    if name not in _VALUES:
        raise ValueError(
            f"after the key only {', '.join(f'{name}=N' for name in _VALUES)} may stand; a key has"
            " no space"
        )
    return name.replace("-", "_"), None if value == "none" else _VALUES[name](name, value)


def _count(name: str, value: str) -> int:
    if not _COUNT.fullmatch(value):
        raise ValueError(f"{name} is {value!r}; expected a whole number from 1, or none")
    return int(value)


def _time_ms(name: str, value: str) -> float:
    if not _TIME_MS.fullmatch(value) or not 0 < float(value) <= MAX_PROMISE_MS:
        raise ValueError(
            f"{name} is {value!r}; expected milliseconds above 0, up to {MAX_PROMISE_MS:.0f}, or"
            " none"
        )
    return float(value)


_VALUES: dict[str, Callable[[str, str], float]] = {
    "max-open-requests": _count,
    "max-tokens-per-minute": _count,
    "ttft-ms": _time_ms,
    "tpot-ms": _time_ms,
}
