"""A scripted tokenizer on a real link."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from services.gateway.chat.requests.parse import Limits
from services.gateway.service import GatewayService
from shared.errors import RequestError
from shared.link.link import Link
from shared.link.peer import Peer
from shared.settings.gateway import GatewayConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    Accepted,
    Cancel,
    Convert,
    Converted,
    Credit,
    Delta,
    Deltas,
    Failed,
    Finished,
    FinishReason,
    Grant,
    Heartbeat,
    Hello,
    Message,
    ModelInfo,
    Overview,
    RunKind,
    State,
    Submit,
    TokenRun,
    Vocabulary,
)
from shared.wire.token_arrays import TokenArrays

PROMPT_IDS = [5, 4, 3, 2, 1]
NUM_PROMPT_TOKENS = len(PROMPT_IDS)
MODEL = ModelInfo(
    names=["fish", "org/fish"], fingerprint="f1", vocab_size=100, max_model_len=64, created=1
)

DESCRIPTION = {"tokenizer_class": "FishTokenizer", "chat_template": "…"}

LIMITS = Limits(max_choices=8, max_logprobs=20)


def encoded(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def vocabulary(size: int) -> list[bytes]:
    """Words, after some that are hard to write in JSON: a quote, the two parts of €, no bytes."""
    special = [b'"', b"\xe2\x82", b"\xac", b"%", b"", b""]
    return special + [f" w{token}".encode() for token in range(len(special), size)]


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.005)


@dataclass
class Submitted:
    """One prompt as received by the tokenizer; a test answers it."""

    submit: Submit
    prompt: Array
    peer: Peer
    files: list[Array] = field(default_factory=list)
    num_sent: Counter[int] = field(default_factory=Counter)
    num_prompt_scored: Counter[int] = field(default_factory=Counter)

    @property
    def key(self) -> tuple[str, int]:
        return self.submit.request, self.submit.attempt

    def accept(self, ids: list[int] = PROMPT_IDS, media: Sequence[int] | None = None) -> None:
        media = [*range(len(self.files))] if media is None else [*media]
        self.peer.send(Accepted(*self.key, media=media), np.array(ids, np.int32))

    def text(self, *texts: str, choice: int = 0) -> None:
        """One token for each text, in one message; ids count up from 10 in each message."""
        first = self.num_sent[choice]
        rows = [
            Delta(*self.key, choice, first + index, TokenRun(1), text)
            for index, text in enumerate(texts)
        ]
        self.num_sent[choice] += len(texts)
        ids = np.arange(first, self.num_sent[choice], dtype=np.int32) % 90 + 10
        self.peer.send(Deltas(rows, []), *TokenArrays(ids))

    def logprobs(
        self,
        text: str,
        ids: list[int],
        values: Any,
        top_ids: Any = None,
        ranks: Any = None,
        choice: int = 0,
        of_prompt: bool = False,
    ) -> None:
        """``values`` [n, num_values] and ``top_ids`` [n, num_top_ids] of n tokens."""
        values = np.array(values, np.float32)
        top = np.zeros((len(ids), 0)) if top_ids is None else np.array(top_ids)
        num_sent = self.num_prompt_scored if of_prompt else self.num_sent
        row = Delta(
            *self.key,
            choice,
            num_sent[choice],
            TokenRun(
                len(ids),
                values.shape[1],
                top.shape[1],
                kind=RunKind.PROMPT if of_prompt else RunKind.OUTPUT,
            ),
            text,
        )
        num_sent[choice] += len(ids)
        arrays = TokenArrays(
            np.array(ids, np.int32),
            values.ravel(),
            top.ravel().astype(np.int32),
            np.array(ranks or [1] * len(ids), np.int32),
        )
        self.peer.send(Deltas([row], []), *arrays)

    def speculate(
        self,
        text: str,
        ids: list[int],
        drafts: list[int],
        num_accepted: int,
        num_top: int = 0,
        choice: int = 0,
    ) -> None:
        """``ids`` of a step that verified ``drafts``, which are sent if the client asked for them.

        Token and draft number i have the logprob −i / 8 and the rank i + 1; a token's alternatives
        are the ids from 0 on, with logprobs falling by an eighth each.
        """
        asked = self.submit.params
        position = self.num_sent[choice]
        self.num_sent[choice] += len(ids)
        sent_drafts = drafts if asked.draft_logprobs else []
        num_values = 0 if asked.logprobs is None else 1 + num_top
        run = TokenRun(
            len(ids), num_values, num_top, num_drafts=len(drafts), num_accepted=num_accepted
        )
        rows = [Delta(*self.key, choice, position, run, text)]
        if sent_drafts:
            run = TokenRun(len(sent_drafts), 1, kind=RunKind.DRAFTS, num_accepted=num_accepted)
            rows.insert(0, Delta(*self.key, choice, position, run))
        own = [*range(len(sent_drafts)), *(range(len(ids)) if num_values else ())]
        eighths = [*range(len(sent_drafts))]
        for number in range(len(ids) if num_values else 0):
            eighths += [number, *range(num_top)]
        arrays = TokenArrays(
            np.array([*sent_drafts, *ids], np.int32),
            np.array(eighths, np.float32) / -8,
            np.tile(np.arange(num_top, dtype=np.int32), len(ids)),
            np.array(own, np.int32) + 1,
        )
        self.peer.send(Deltas(rows, []), *arrays)

    def finish(
        self,
        reason: FinishReason = "stop",
        choice: int = 0,
        stop_reason: int | str | None = None,
        num_cached: int = 0,
    ) -> None:
        num_sent = self.num_sent[choice]
        finished = Finished(*self.key, choice, reason, num_sent, stop_reason, num_cached)
        self.peer.send(Deltas([], [finished]), *TokenArrays())

    def fail(self, status: int, code: str, message: str, **details: Any) -> None:
        self.peer.send(Failed(*self.key, status, "some_error", code, message, **details))


class FakeTokenizer:
    """Converts a text to the values of its bytes, and ids to the bytes of their tokens."""

    def __init__(
        self, mesh_dir: Path, instance: str, model: ModelInfo = MODEL, minor: int = PROTOCOL_MINOR
    ) -> None:
        self.state = State.READY
        self.overviews: list[Overview] = []
        self.vocabulary = vocabulary(model.vocab_size)
        self.submitted: asyncio.Queue[Submitted] = asyncio.Queue()
        self.cancelled: asyncio.Queue[Cancel] = asyncio.Queue()
        self.converted: list[Convert] = []
        self.converted_files: list[list[Array]] = []
        self.conversion_error: RequestError | None = None
        self.converts = True
        self.aborted: list[str] = []
        self.abort_owners: list[str] = []
        self.granted: list[Grant] = []
        hello = Hello(PROTOCOL_MAJOR, minor, "tokenizer", instance, model)
        self.link = Link(hello, self)
        self.link.listen(mesh_dir, "gateway")

    async def accepted(self) -> Submitted:
        request = await self.submitted.get()
        request.accept()
        return request

    async def answer(
        self, *texts: str, reason: FinishReason = "stop", is_merged: bool = False
    ) -> Submitted:
        """Serves the next request; ``is_merged``: all text in one message, or one each."""
        request = await self.accepted()
        for group in [texts] if is_merged else [[text] for text in texts]:
            request.text(*group)
        request.finish(reason)
        return request

    def status(self) -> Heartbeat:
        first, more = next(iter(self.overviews), None), self.overviews[1:]
        return Heartbeat(self.state, "the water is cold", 0, 0, overview=first, more_overviews=more)

    def refusal(self, hello: Hello) -> str | None:
        return None

    def on_up(self, peer: Peer) -> None:
        data = np.frombuffer(b"".join(self.vocabulary), np.uint8)
        peer.send(Vocabulary(), data, np.array(list(map(len, self.vocabulary)), np.int32))

    def on_down(self, peer: Peer, reason: str) -> None: ...

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        match message:
            case Submit():
                self.submitted.put_nowait(Submitted(message, arrays[0], peer, arrays[2:]))
            case Cancel():
                self.cancelled.put_nowait(message)
            case Convert():
                self.converted_files.append(arrays[1:])
                self._convert(peer, message, arrays[0])
            case Abort(ids, owner):
                self.aborted += ids
                self.abort_owners.append(owner)
            case Credit(grants):
                self.granted += grants

    def _convert(self, peer: Peer, message: Convert, data: Array) -> None:
        self.converted.append(message)
        if not self.converts:
            return
        if self.conversion_error is not None:
            peer.send(self.conversion_error.to_failed(message.request, 0))
        elif message.to == "tokenizer":
            peer.send(Converted(message.request), encoded(msgspec.json.encode(DESCRIPTION)))
        elif message.kind == "ids":
            text = b"".join(self.vocabulary[token] for token in data.tolist())
            peer.send(Converted(message.request), encoded(text))
        else:
            peer.send(Converted(message.request), data.astype(np.int32) % len(self.vocabulary))


@asynccontextmanager
async def fake_tokenizer(
    mesh_dir: Path, instance: str = "t1", model: ModelInfo = MODEL, minor: int = PROTOCOL_MINOR
) -> AsyncIterator[FakeTokenizer]:
    tokenizer = FakeTokenizer(mesh_dir, instance, model, minor)
    running = asyncio.create_task(tokenizer.link.run())
    try:
        yield tokenizer
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await tokenizer.link.close("the test ends")


@asynccontextmanager
async def running_gateway(mesh_dir: Path, **settings: Any) -> AsyncIterator[GatewayService]:
    """A gateway on a free port; raises its error at the end."""
    config: dict[str, Any] = {"mesh_dir": mesh_dir, "port": 0, "ready_wait_s": 0} | settings
    gateway = GatewayService(GatewayConfig(**config))
    running = asyncio.create_task(gateway.run())
    try:
        await until(lambda: gateway.port or running.done())
        yield gateway
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
