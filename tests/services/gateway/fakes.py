"""A tokenizer that says what a test tells it to, on a real link."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway.service import GatewayService
from shared.codec import Array
from shared.config import GatewayConfig
from shared.link import Link
from shared.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Accepted,
    Cancel,
    Delta,
    Deltas,
    Failed,
    Finished,
    FinishReason,
    Heartbeat,
    Hello,
    Message,
    ModelInfo,
    State,
    Submit,
)
from shared.peer import Peer

NUM_PROMPT_TOKENS = 5
MODEL = ModelInfo(
    names=["fish", "org/fish"], fingerprint="f1", vocab_size=100, max_model_len=64, created=1
)


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.005)


@dataclass
class Submitted:
    """One request as it reached the tokenizer; a test answers it."""

    submit: Submit
    prompt: Array
    peer: Peer
    num_sent: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.submit.request, self.submit.attempt

    def accept(self) -> None:
        self.peer.send(Accepted(*self.key, NUM_PROMPT_TOKENS))

    def text(self, *texts: str) -> None:
        """One token for each text, in one message."""
        rows = [
            Delta(*self.key, 0, self.num_sent + index, 1, text) for index, text in enumerate(texts)
        ]
        self.num_sent += len(texts)
        self.peer.send(Deltas(rows, []))

    def finish(self, reason: FinishReason = "stop") -> None:
        finished = Finished(*self.key, reason, NUM_PROMPT_TOKENS, self.num_sent)
        self.peer.send(Deltas([], [finished]))

    def fail(self, status: int, code: str, message: str, **details: Any) -> None:
        self.peer.send(Failed(*self.key, status, "some_error", code, message, **details))


class FakeTokenizer:
    def __init__(self, mesh_dir: Path, instance: str, model: ModelInfo = MODEL) -> None:
        self.state = State.READY
        self.submitted: asyncio.Queue[Submitted] = asyncio.Queue()
        self.cancelled: asyncio.Queue[Cancel] = asyncio.Queue()
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "tokenizer", instance, model)
        self.link = Link(hello, self)
        self.link.listen(mesh_dir, "gateway")

    async def answer(
        self, *texts: str, reason: FinishReason = "stop", is_merged: bool = False
    ) -> Submitted:
        """Serves the next request; ``is_merged``: all text in one message, or one each."""
        request = await self.submitted.get()
        request.accept()
        for group in [texts] if is_merged else [[text] for text in texts]:
            request.text(*group)
        request.finish(reason)
        return request

    def status(self) -> Heartbeat:
        return Heartbeat(self.state, "the water is cold", 0, 0)

    def refusal(self, hello: Hello) -> str | None:
        return None

    def on_up(self, peer: Peer) -> None: ...

    def on_down(self, peer: Peer, reason: str) -> None: ...

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        match message:
            case Submit():
                self.submitted.put_nowait(Submitted(message, arrays[0], peer))
            case Cancel():
                self.cancelled.put_nowait(message)


@asynccontextmanager
async def fake_tokenizer(
    mesh_dir: Path, instance: str = "t1", model: ModelInfo = MODEL
) -> AsyncIterator[FakeTokenizer]:
    tokenizer = FakeTokenizer(mesh_dir, instance, model)
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
    """A gateway on a port of the kernel's choice; raises what ended it."""
    config: dict[str, Any] = {"mesh_dir": mesh_dir, "port": 0} | settings
    gateway = GatewayService(GatewayConfig(**config))
    running = asyncio.create_task(gateway.run())
    try:
        await until(lambda: gateway.port or running.done())
        yield gateway
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
