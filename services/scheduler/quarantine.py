"""Requests that workers died of are refused for a while."""

from hashlib import blake2b
from math import ceil

import msgspec
import numpy as np

from shared.errors import QUARANTINED, InvalidRequest
from shared.wire.messages import SamplingParams

MAX_QUARANTINED = 1024


class Quarantine:
    """A client that repeats such a request would take two workers with each try. Times are
    monotonic. Pure.

    Requests are the same if prompt, parameters and salt are. Left out are the seed, which differs
    with each try unless the client sets one, and logprobs of the prompt, which only the first
    choice brings. The oldest of ``MAX_QUARANTINED`` gives way to a new one.
    """

    def __init__(self, quarantine_s: float) -> None:
        self._quarantine_s = quarantine_s
        self._until_s: dict[bytes, float] = {}  # in the order in which they came

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, prompt: np.ndarray, params: SamplingParams, salt: str, now_s: float) -> None:
        digest = _digest(prompt, params, salt)
        self._until_s.pop(digest, None)
        self._until_s[digest] = now_s + self._quarantine_s
        self._drop_old(now_s)

    def check(self, prompt: np.ndarray, params: SamplingParams, salt: str, now_s: float) -> None:
        """Raises InvalidRequest for one that is here."""
        self._drop_old(now_s)
        if not self._until_s:
            return
        until_s = self._until_s.get(_digest(prompt, params, salt))
        if until_s is None:
            return
        left_s = until_s - now_s
        raise InvalidRequest(
            "workers died while they ran this request, so it is not run again for"
            f" {ceil(left_s)} s (quarantine-s = {self._quarantine_s:g})",
            code=QUARANTINED,
            retry_after_s=left_s,
        )

    def _drop_old(self, now_s: float) -> None:
        for digest, until_s in list(self._until_s.items()):
            if until_s > now_s and len(self) <= MAX_QUARANTINED:
                return
            del self._until_s[digest]


def _digest(prompt: np.ndarray, params: SamplingParams, salt: str) -> bytes:
    """``prompt`` [prompt_len] int32."""
    params = msgspec.structs.replace(params, seed=0, prompt_logprobs=None)
    header = msgspec.msgpack.encode((salt, params))
    return blake2b(header + prompt.tobytes(), digest_size=16).digest()
