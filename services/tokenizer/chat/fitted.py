"""The messages of a chat that are in its prompt. Pure."""

from collections.abc import Callable
from typing import NamedTuple

from services.tokenizer.chat.normalize import Message
from services.tokenizer.observer import Measure
from shared.wire.codec import Array
from shared.wire.messages import NOTHING_DROPPED, Dropped

Encode = Callable[[list[Message], Measure], Array]
NumTokens = Callable[[Message], int]


class FittedChat(NamedTuple):
    """``ids`` [prompt_len] int32 of the ``messages`` that are left."""

    messages: list[Message]
    ids: Array
    dropped: Dropped = NOTHING_DROPPED


def whole(
    messages: list[Message],
    limit: int,
    encode: Encode,
    measure: Measure,
    num_media_tokens: NumTokens,
) -> FittedChat:
    """All ``messages``, whatever the ``limit``."""
    return FittedChat(messages, encode(messages, measure))
