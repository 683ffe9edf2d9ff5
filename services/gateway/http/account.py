"""Open requests and used tokens of one API key, and their limits."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

from aiohttp import web
from pydantic import SecretStr

from services.gateway.metrics import KEY_REFUSALS, KEY_TOKENS
from shared.errors import Overloaded
from shared.process.rate import Rate
from shared.wire.envelope import Promise

NUM_ID_DIGITS = 16
MAX_OPEN = "max-open-requests-per-key"
MAX_TOKENS = "max-tokens-per-minute-per-key"
RATE_LIMITED = "rate_limit_exceeded"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """None: no limit. ``ttft_ms`` and ``tpot_ms`` are promises to the key, as in Promise, and the
    shortest times that its requests may ask for."""

    max_open_requests: int | None
    max_tokens_per_minute: int | None
    ttft_ms: float | None = None
    tpot_ms: float | None = None


class OpenRequests:
    """Open requests of one kind of a key; ``name`` is their name in errors; ``most`` None: no
    limit."""

    def __init__(self, most: int | None, name: str, refuse: Callable[[], None]) -> None:
        self._most = most
        self._name = name
        self._refuse = refuse
        self._num = 0
        self._ends = Rate()

    def one(self) -> AbstractContextManager[None]:
        """Counts one while it is open. Raises Overloaded at the limit."""
        return self._counted(1, "")

    def more(self, num: int) -> AbstractContextManager[None]:
        """Counts an open one ``num`` more times, or as often as the limit allows at all. Raises
        Overloaded at the limit."""
        num = num if self._most is None else min(num, self._most - 1)
        return self._counted(num, f", this one counts for {num} more")

    @contextmanager
    def _counted(self, num: int, what: str) -> Iterator[None]:
        if self._most is not None and self._num + num > self._most:
            self._refuse()
            raise Overloaded(
                f"{self._num} {self._name} of this API key are open{what}; the limit is"
                f" {self._most} ({MAX_OPEN})",
                code=RATE_LIMITED,
                retry_after_s=self._ends.retry_after_s(time.monotonic()),
            )
        if self._num == 0:
            self._ends.start(time.monotonic())
        self._num += num
        try:
            yield
        finally:
            self._num -= num
            self._ends.note(num, time.monotonic())


class Account:
    """``key_id``, the beginning of the key's digest, names it in metrics, logs and in the mesh.

    Tokens are counted once they are known: a prompt's when its request is accepted, generated ones
    as they come. So a request is admitted while its key has any tokens left, and is not cut off
    when they are used up.
    """

    def __init__(self, key: SecretStr, limits: KeyLimits) -> None:
        self.digest = sha256(key.get_secret_value().encode()).digest()
        self.key_id = self.digest.hex()[:NUM_ID_DIGITS]
        refuse, most = partial(self._count_refusal, MAX_OPEN), limits.max_open_requests
        self._generating = OpenRequests(most, "requests", refuse)
        self._others = OpenRequests(most, "requests that generate nothing", refuse)
        per_minute = limits.max_tokens_per_minute
        self._bucket = TokenBucket(per_minute, time.monotonic()) if per_minute else None
        self._num_tokens = KEY_TOKENS.labels(self.key_id)
        self.promise = Promise(ttft_ms=limits.ttft_ms, tpot_ms=limits.tpot_ms)

    def request(self, *, generates: bool) -> AbstractContextManager[None]:
        """While one is open. Raises Overloaded at a limit."""
        if not generates:
            return self._others.one()
        self._check_tokens()
        return self._generating.one()

    def texts(self, num: int) -> AbstractContextManager[None]:
        """While an open request generates ``num`` texts; each counts as a request. Raises
        Overloaded at the limit."""
        return self._generating.more(num - 1)

    def charge(self, num_tokens: int) -> None:
        self._num_tokens.inc(num_tokens)
        if self._bucket is not None:
            self._bucket.take(num_tokens, time.monotonic())

    def _check_tokens(self) -> None:
        if self._bucket is None or (wait_s := self._bucket.wait_s(time.monotonic())) <= 0:
            return
        self._count_refusal(MAX_TOKENS)
        raise Overloaded(
            "this API key has used up its tokens, of prompts and generated; the limit is"
            f" {self._bucket.per_minute} a minute ({MAX_TOKENS})",
            code=RATE_LIMITED,
            retry_after_s=wait_s,
        )

    def _count_refusal(self, limit: str) -> None:
        KEY_REFUSALS.labels(self.key_id, limit).inc()


ACCOUNT = web.RequestKey("account", Account)
"""The account of a request's API key; absent if the server has no keys."""


def owner_of(request: web.Request) -> str:
    """The ``key_id`` of the request's API key; empty where the server has no keys."""
    account = request.get(ACCOUNT)
    return account.key_id if account is not None else ""


class TokenBucket:
    """Holds at most one minute's refill of ``per_minute``; times are monotonic. Pure.

    The level may become negative: the tokens of a request are known when it has ended, and the next
    request waits until the level is positive again.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._updated_s = now_s

    def take(self, num: int, now_s: float) -> None:
        self._left = self._filled(now_s) - num
        self._updated_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until it holds a token."""
        return max(0.0, (1 - self._filled(now_s)) * 60 / self.per_minute)

    def _filled(self, now_s: float) -> float:
        poured = (now_s - self._updated_s) * self.per_minute / 60
        return min(self.per_minute, self._left + poured)
