"""Each receiver of messages by itself, without sockets: a bad message may only be refused, or fail
its own request.

An arena has valid messages, ``examples``, and takes a bad one in place of one of them; it returns
True if the message was accepted. Traffic of another sender must continue correctly. ``lies`` are
messages with several faults, by their description. Undecodable messages reach no receiver
(``shared.link.peer.try_decode``), so arenas take decoded ones.
"""

from typing import Any, Protocol

import numpy as np
from msgspec import Raw
from msgspec.msgpack import encode as encode_msgpack

from shared.link.peer import Peer
from shared.wire.codec import Array, decode, encode
from shared.wire.envelope import MAX_OPTION_BYTES, Promise, RequestOptions, write_options
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    Adapter,
    Capacity,
    Guide,
    Heartbeat,
    Hello,
    Message,
    ModelInfo,
    Repetition,
    SamplingParams,
    ServiceName,
    Span,
    State,
)

NO_IDS = np.zeros(0, np.int32)
NO_ARRAYS = [NO_IDS, np.zeros(0, np.float32), NO_IDS, NO_IDS]
PROMPT = np.array([5, 6, 7, 8], np.int32)
# All options, so that every field can be made odd.
PARAMS = SamplingParams(
    seed=3,
    temperature=0.5,
    top_k=5,
    top_p=0.9,
    max_tokens=6,
    min_p=0.01,
    top_n_sigma=3.0,
    logprob_token_ids=[6, 3],
    repetition=Repetition(4, 2, 3),
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    min_tokens=1,
    stop_token_ids=[9],
    allowed_token_ids=[3, 4, 5, 6, 7, 8, 9, 10],
    logit_bias=[(4, 1.0)],
    bad_words=[[3, 4], [5]],
    logprobs=2,
    prompt_logprobs=1,
    draft_logprobs=True,
    guide=Guide('start: /[a-z ]{1,9}/ | "(" start ")"', True, [11], [12], 1, [13, 12]),
)
SPANS = [
    Span("whole", 1e9, 2.0, 0, {"reason": "slots", "slots_ms": 1.5, "num": 3, "is_odd": True}),
    Span("part", 1e9, 1.0, 1, {"worker": "w"}),
]
PLAIN = SamplingParams(seed=0, temperature=0.0, max_tokens=6)
TRACED = write_options(RequestOptions(is_traced=True))
ADAPTER = Adapter(
    name="sql",
    digest="ab" * 16,
    rank=8,
    num_bytes=1 << 20,
    loaded_s=1e9,
    path="sql",
    load="l1",
)
REFUSED = Adapter(name="law", path="law", load="l2", problem="no such folder", is_retired=True)
PROMISE = Promise(ttft_ms=300.0, tpot_ms=20.0)
SALTED = write_options(RequestOptions(priority=1, salt="salt", owner="me", promise=PROMISE))
NO_ROW = Raw(encode_msgpack("salt"))
NO_TIME_ROW = Raw(encode_msgpack([0, "", "", False, 0, "", [300.0, 0.0]]))
LONG_ROW = Raw(encode_msgpack([0, "", "", False, 0, "", "x" * MAX_OPTION_BYTES]))

Example = tuple[Message, list[np.ndarray]]
Lies = dict[str, tuple[int, Message, list[np.ndarray]]]


class Arena(Protocol):
    examples: list[Example]
    lies: Lies

    async def take(self, index: int, message: Message, arrays: list[Array]) -> bool: ...

    async def close(self) -> None: ...


def connect(
    service: ServiceName, model: ModelInfo | None, capacity: Capacity | None = None, name: str = ""
) -> "FakePeer":
    return FakePeer(Hello(PROTOCOL_MAJOR, 0, service, name or service[0], model, capacity))


class FakePeer(Peer):
    """Is ready, and keeps the messages sent to it, as they would arrive."""

    def __init__(self, hello: Hello) -> None:
        super().__init__(hello, self._keep)
        self.status = Heartbeat(State.READY, "", 0, 0)
        self.got: list[tuple[Message, list[Array]]] = []

    def _keep(self, peer: Peer, message: Message, arrays: tuple[Array, ...]) -> None:
        self.got.append(decode([bytes(frame) for frame in encode(message, arrays)]))

    def take(self, kind: type | tuple[type, ...]) -> list[tuple[Any, list[Array]]]:
        taken = [each for each in self.got if isinstance(each[0], kind)]
        self.got = [each for each in self.got if not isinstance(each[0], kind)]
        return taken
