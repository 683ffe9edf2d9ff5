"""Messages of both upper links: gateway ⇄ tokenizer and tokenizer ⇄ scheduler."""

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from shared.wire.messages.ranges import MAX_LEFT_OUT, Int32, Int64, Name, Reason, Row, Seconds


class RequestKey(Row, frozen=True):
    request: Name
    attempt: Int32


class Cancel(Row, tag=12, frozen=True):
    """Down both upper links: the client does not wait for these requests any more. A key that is
    unknown is ignored."""

    keys: list[RequestKey]


class Grant(Row, frozen=True):
    """One sequence may emit up to ``num_tokens`` tokens and ``num_bytes`` bytes in all."""

    request: Name
    attempt: Int32
    num_tokens: Int64
    num_bytes: Int64


class Credit(Row, tag=14, frozen=True):
    """Down both upper links, as clients take what came: a sequence without credit is not planned.

    Bytes are those of the arrays in Tokens and Deltas. An attempt begins with ``WINDOW_TOKENS`` and
    ``WINDOW_BYTES`` beyond what it resumes.
    """

    grants: list[Grant]


class OutputStart(IntEnum):
    """What the first token of a text belongs to: the answer or the reasoning, as the prompt ends,
    or the one that the model begins itself."""

    ANSWER = 0
    REASONING = 1
    UNDECIDED = 2


class Dropped(Row, frozen=True):
    """The oldest turns of a chat, which are not in its prompt, and the tokens that they had."""

    num_turns: Int32 = 0
    num_tokens: Int32 = 0


NOTHING_DROPPED = Dropped()


class Accepted(Row, tag=20, frozen=True):
    """All choices will run. Until it arrives, a gateway has sent no byte to the client.

    Buffer: int32 ids of the prompt; a scheduler, whose peer knows them, sends none. A tokenizer
    sets ``start``, ``dropped`` and ``left_out``, places in the request of what its schemas say and
    nothing holds.
    """

    request: Name
    attempt: Int32
    start: OutputStart = OutputStart.ANSWER
    dropped: Dropped = NOTHING_DROPPED
    left_out: Annotated[list[Name], Meta(max_length=MAX_LEFT_OUT)] = []


class Lost(Row, tag=26, frozen=True):
    """Tokenizer → gateway: the scheduler that had these is gone, or hands them over; submit them
    anew. No terminal. Scheduler → tokenizer: these prompts are handed over to another cell.

    ``is_explained``: see ``Peer``; none of the requests can have been the reason. Without keys:
    nor can those have been that were lost with it before, since it lives and stood still.
    ``scheduler`` is its instance. ``num_worker_deaths``: as in RequestOptions.
    """

    keys: list[RequestKey]
    is_explained: bool = False
    scheduler: Name = ""
    num_worker_deaths: Int32 = 0


class Failed(Row, tag=24, frozen=True):
    """The one bad terminal of a request, up every link; the fields are those of
    ``errors.RequestError``. A scheduler names the prompt if it takes none of its sequences, and one
    of them if that breaks later."""

    request: Name
    attempt: Int32
    status: Annotated[int, Meta(ge=400, le=599)]
    error_type: Name
    code: Name
    message: Reason
    param: Name | None = None
    retry_after_s: Seconds | None = None
