"""Splits a message with lists too long for one header into two equivalent ones."""

from collections.abc import Sequence

from msgspec.structs import replace

from shared.wire.codec import Array
from shared.wire.messages import Cancel, Credit, Deltas, Lost, Message, Tokens
from shared.wire.token_arrays import Layout, TokenArrays

Part = tuple[Message, Sequence[Array]]


def halves(message: Message, arrays: Sequence[Array]) -> list[Part]:
    """Two messages to send in this order; empty if the message cannot be divided. The end of a
    choice stays after its tokens."""
    match message:
        case Lost(keys) | Cancel(keys) if len(keys) > 1:
            middle = len(keys) // 2
            return [(replace(message, keys=some), ()) for some in (keys[:middle], keys[middle:])]
        case Credit(grants) if len(grants) > 1:
            middle = len(grants) // 2
            return [(Credit(some), ()) for some in (grants[:middle], grants[middle:])]
        case Tokens() | Deltas():
            return _of_tokens(message, TokenArrays(*arrays))
        case _:
            return []


def _of_tokens(message: Tokens | Deltas, arrays: TokenArrays) -> list[Part]:
    rows, finished, spans = message.rows, message.finished, message.spans
    if len(rows) > 1:
        layout, middle = Layout(rows, arrays), len(rows) // 2
        first, last = layout.part(0, middle), layout.part(middle, len(rows))
        return [
            (replace(message, rows=rows[:middle], finished=[], spans=[]), first),
            (replace(message, rows=rows[middle:]), last),
        ]
    if len(finished) > 1:
        middle = len(finished) // 2
        return [
            (replace(message, finished=finished[:middle], spans=[]), arrays),
            (replace(message, rows=[], finished=finished[middle:]), TokenArrays()),
        ]
    if len(spans) > 1:
        middle = len(spans) // 2
        return [
            (replace(message, spans=spans[:middle]), arrays),
            (replace(message, rows=[], finished=[], spans=spans[middle:]), TokenArrays()),
        ]
    return []
