"""Peers that send a proper Hello to a real service, followed by something else."""

import asyncio
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from shared.wire.codec import decode, encode
from shared.wire.messages import Bye, Hello, Refused

SETTLE_S = 0.3
NAMES = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Attack:
    """Messages after Hello; ``before`` is valid, and ``frames`` are odd."""

    name: str
    frames: list[bytes]
    before: tuple[list[bytes], ...] = ()


def frames_of(message, arrays=()) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, arrays)]


async def call_all(
    address: str,
    hello: Hello,
    attacks: Iterable[Attack],
    protect: Callable[[zmq.asyncio.Socket], None] = lambda socket: None,
    at_once: int = 8,
) -> None:
    """Each peer uses its own connection to the service at ``address``, which answers each Hello.
    ``protect`` sets the keys of a socket."""
    waiting = list(attacks)
    with zmq.asyncio.Context() as context:
        for start in range(0, len(waiting), at_once):
            some = enumerate(waiting[start : start + at_once], start)
            await asyncio.gather(*(_call(context, address, hello, protect, *each) for each in some))


async def _call(
    context: zmq.asyncio.Context,
    address: str,
    hello: Hello,
    protect: Callable[[zmq.asyncio.Socket], None],
    number: int,
    attack: Attack,
) -> None:
    own = msgspec.structs.replace(hello, instance=f"intruder-{number}")
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        protect(socket)
        socket.connect(address)
        await socket.send_multipart(frames_of(own))
        answer, _ = decode(await asyncio.wait_for(socket.recv_multipart(), 20))
        assert not isinstance(answer, Refused) or "protocol" not in answer.reason, answer
        name = NAMES[number % len(NAMES)].encode()  # a unique name of the same length
        for frames in (*attack.before, attack.frames):
            await socket.send_multipart([frame.replace(b"r~1", b"r~" + name) for frame in frames])
        await asyncio.sleep(SETTLE_S)


async def be_called(path: Path, hello: Hello, attacks: Iterable[Attack]) -> None:
    """One peer for each time a service dials ``path``; returns when it has dialled once more."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind(f"ipc://{path}")
        for attack in attacks:
            route = await _next_hello(socket, attack.name)
            for frames in (frames_of(hello), *attack.before, attack.frames, frames_of(Bye("next"))):
                await socket.send_multipart([route, *frames])
        await _next_hello(socket, "the end")


async def _next_hello(socket: zmq.asyncio.Socket, name: str) -> bytes:
    decoder = msgspec.msgpack.Decoder()
    async with asyncio.timeout(30):
        while True:
            route, header, *_ = await socket.recv_multipart()
            if decoder.decode(header)[0][0] == Hello.__struct_config__.tag:
                return route
