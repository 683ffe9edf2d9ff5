"""What one API key has open and has used, and how much of both it may."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

from aiohttp import web
from pydantic import SecretStr

from services.gateway.http.token_bucket import TokenBucket
from services.gateway.metrics import KEY_REFUSALS, KEY_TOKENS
from shared.errors import Overloaded
from shared.rate import Rate

NUM_ID_DIGITS = 16


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """None: no limit."""

    max_open_requests: int | None
    max_tokens_per_minute: int | None


class Account:
    """``key_id``, the beginning of the key's digest, names it in metrics, logs and in the mesh.

    Tokens are counted when they are known: those of the prompt when a request is accepted, those
    that were generated as they come. So a request is let in while its key has any left, and is not
    cut off when they are used up.
    """

    def __init__(self, key: SecretStr, limits: KeyLimits) -> None:
        self.digest = sha256(key.get_secret_value().encode()).digest()
        self.key_id = self.digest.hex()[:NUM_ID_DIGITS]
        self._max_open = limits.max_open_requests
        self._num_open = 0
        self._ends = Rate()
        per_minute = limits.max_tokens_per_minute
        self._bucket = TokenBucket(per_minute, time.monotonic()) if per_minute else None
        self._num_tokens = KEY_TOKENS.labels(self.key_id)

    @contextmanager
    def request(self) -> Iterator[None]:
        """While one is open. Raises Overloaded at a limit."""
        self._check(time.monotonic())
        if self._num_open == 0:
            self._ends.start(time.monotonic())
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._ends.note(1, time.monotonic())

    def charge(self, num_tokens: int) -> None:
        self._num_tokens.inc(num_tokens)
        if self._bucket is not None:
            self._bucket.take(num_tokens, time.monotonic())

    def _check(self, now_s: float) -> None:
        if self._max_open is not None and self._num_open >= self._max_open:
            raise self._refusal(
                "max-open-requests-per-key",
                f"{self._num_open} requests of this API key are open; the limit is"
                f" {self._max_open} (max-open-requests-per-key)",
                self._ends.retry_after_s(now_s),
            )
        if self._bucket is not None and (wait_s := self._bucket.wait_s(now_s)) > 0:
            raise self._refusal(
                "max-tokens-per-minute-per-key",
                "this API key has used up its tokens, of prompts and generated; the limit is"
                f" {self._bucket.per_minute} a minute (max-tokens-per-minute-per-key)",
                wait_s,
            )

    def _refusal(self, limit: str, message: str, wait_s: float) -> Overloaded:
        KEY_REFUSALS.labels(self.key_id, limit).inc()
        return Overloaded(message, code="rate_limit_exceeded", retry_after_s=wait_s)


ACCOUNT = web.RequestKey("account", Account)
"""Whose request it is; none where the server has no keys."""


def owner_of(request: web.Request) -> str:
    """The ``key_id`` of the request's API key; empty where the server has no keys."""
    account = request.get(ACCOUNT)
    return account.key_id if account is not None else ""
