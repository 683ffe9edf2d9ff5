"""Peers that send a proper Hello to a real service, followed by something else."""

import asyncio
import random
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from shared.model_folder import EMBEDDED_MODEL, read_model_info
from shared.wire.codec import decode, encode
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    Capacity,
    Failed,
    Hello,
    ModelInfo,
    Refused,
    ServiceName,
    StepResult,
    Tokens,
)
from tests.mesh.hostile import odd_versions, with_turned_bits

MAX_MODEL_LEN = 512
MODEL = read_model_info(EMBEDDED_MODEL, ["m"], MAX_MODEL_LEN)
# Too small for any sequence: the intruder gets no plan, and no sequence is lost with it.
TINY = Capacity(1, 16, 1, 64, MODEL.max_model_len, MODEL.vocab_size)
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


def hello(
    service: ServiceName, model: ModelInfo | None = None, capacity: Capacity | None = None
) -> Hello:
    return Hello(PROTOCOL_MAJOR, 0, service, "intruder", model, capacity)


def attacks_on(arena: Any, num: int, dice: random.Random, kinds: tuple[type, ...]) -> list[Attack]:
    """``num`` attacks, half of them by flipped bits."""
    examples = [(i, each) for i, each in enumerate(arena.examples) if isinstance(each[0], kinds)]
    attacks = [
        Attack(odd.name, odd.frames, _before(arena, index))
        for index, example in examples
        for odd in odd_versions(*example)
    ]
    attacks = dice.sample(attacks, min(len(attacks), num // 2))
    for _ in range(num - len(attacks)):
        index, (message, arrays) = dice.choice(examples)
        odd = with_turned_bits(message, arrays, dice)
        attacks.append(Attack(odd.name, odd.frames, _before(arena, index)))
    return attacks


def _before(arena: Any, index: int) -> tuple[list[bytes], ...]:
    """The request in question."""
    first, arrays = arena.examples[0]
    has_first = index > 0 and not isinstance(arena.examples[index][0], (StepResult, Tokens, Failed))
    return (frames_of(first, arrays),) if has_first else ()


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
