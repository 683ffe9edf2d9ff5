"""Messages of both upper links: gateway ⇄ tokenizer and tokenizer ⇄ scheduler."""

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from shared.wire.messages.media import MAX_MEDIA
from shared.wire.messages.ranges import MAX_LEFT_OUT, Int32, Int64, Name, Reason, Row, Seconds


class RequestKey(Row, frozen=True):
    request: Name
    attempt: Int32


class Cancel(Row, tag=12, frozen=True):
    """Down both upper links: the client no longer waits for these requests. Unknown keys are
    ignored."""

    keys: list[RequestKey]


class Grant(Row, frozen=True):
    """One sequence may emit up to ``num_tokens`` tokens and ``num_bytes`` bytes in all."""

    request: Name
    attempt: Int32
    num_tokens: Int64
    num_bytes: Int64


class Credit(Row, tag=14, frozen=True):
    """Down both upper links, as clients read: a sequence without credit is not planned.

    Bytes count the arrays in Tokens and Deltas. An attempt begins with ``WINDOW_TOKENS`` and
    ``WINDOW_BYTES`` beyond its resumed output.
    """

    grants: list[Grant]


class OutputStart(IntEnum):
    """The part an output begins with: the answer or reasoning if the prompt decides it, else
    undecided."""

    ANSWER = 0
    REASONING = 1
    UNDECIDED = 2


class Dropped(Row, frozen=True):
    """The oldest turns of a chat, dropped from its prompt, and their number of tokens."""

    num_turns: Int32 = 0
    num_tokens: Int32 = 0


NOTHING_DROPPED = Dropped()


class Accepted(Row, tag=20, frozen=True):
    """All choices will run. Until it arrives, a gateway sends no byte to the client.

    Buffer: int32 ids of the prompt; a scheduler sends none, since its peer knows them. A tokenizer
    sets ``start``, ``dropped``, ``left_out``, the places of schema keywords in the request that are
    not enforced, and ``media``, the numbers of the media that the prompt holds, in its order.
    """

    request: Name
    attempt: Int32
    start: OutputStart = OutputStart.ANSWER
    dropped: Dropped = NOTHING_DROPPED
    left_out: Annotated[list[Name], Meta(max_length=MAX_LEFT_OUT)] = []
    media: Annotated[list[Int32], Meta(max_length=MAX_MEDIA)] = []


class Lost(Row, tag=26, frozen=True):
    """Tokenizer → gateway: the scheduler of these requests is lost or hands them over; submit them
    again. No terminal. Scheduler → tokenizer: these prompts are handed over to another cell.

    ``is_explained``: see ``Peer``; the requests are not the cause. Without keys: the scheduler
    stood still and is alive, so requests lost with it before are not the cause either.
    ``scheduler`` is its instance. ``num_worker_deaths``: as in RequestOptions.
    """

    keys: list[RequestKey]
    is_explained: bool = False
    scheduler: Name = ""
    num_worker_deaths: Int32 = 0


class Failed(Row, tag=24, frozen=True):
    """The one bad terminal of a request, up every link, with the fields of ``errors.RequestError``.
    A scheduler names the prompt if it refuses all its sequences, and a sequence if that one fails
    later."""

    request: Name
    attempt: Int32
    status: Annotated[int, Meta(ge=400, le=599)]
    error_type: Name
    code: Name
    message: Reason
    param: Name | None = None
    retry_after_s: Seconds | None = None
