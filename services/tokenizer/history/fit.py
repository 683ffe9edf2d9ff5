"""Chats that have become too long, without their oldest turns. Pure.

A chat is cut only at places that depend on nothing but the messages before them, so a place stays
valid as the chat grows; the chat is cut at the first place from which it fits. The prompts of a
chat therefore begin alike until it has grown by a step, and the prefix cache finds them.
"""

from bisect import bisect_left
from functools import cache
from itertools import accumulate

from services.tokenizer.chat.fitted import Encode, FittedChat, NumTokens
from services.tokenizer.chat.normalize import Message
from services.tokenizer.history.turns import Turns
from services.tokenizer.observer import Measure, unmeasured
from shared.errors import InvalidRequest
from shared.wire.messages import Dropped

NUM_STEPS = 4  # between two places is about this part of the limit
TOKEN_BYTES = 4  # reckoned: places must not move when texts are tokenised otherwise


def fit(
    messages: list[Message],
    limit: int,
    encode: Encode,
    measure: Measure = unmeasured,
    num_media_tokens: NumTokens = lambda message: 0,
) -> FittedChat:
    """``messages`` without the fewest turns that the places allow, so that the prompt has at most
    ``limit`` tokens; 0: no limit. The last turn always stays. Raises InvalidRequest if it is too
    long by itself."""
    ids = encode(messages, measure)
    if not limit or len(ids) <= limit:
        return FittedChat(messages, ids)
    with measure("history") as attributes:
        fitted = _cut(messages, len(ids), limit, encode, num_media_tokens)
        attributes["num_dropped_turns"] = fitted.dropped.num_turns
    return fitted


def _cut(
    messages: list[Message],
    num_tokens: int,
    limit: int,
    encode: Encode,
    num_media_tokens: NumTokens,
) -> FittedChat:
    turns = Turns(messages)
    sizes = turns.sizes(lambda message: TOKEN_BYTES * num_media_tokens(message))
    if len(sizes) < 2:
        raise _too_long(num_tokens, limit, "the only turn")

    @cache
    def fitted(num_dropped: int) -> FittedChat:
        rest = turns.without_first(num_dropped)
        ids = encode(rest, unmeasured)
        return FittedChat(rest, ids, Dropped(num_dropped, max(num_tokens - len(ids), 0)))

    places = _places(sizes, max(limit * TOKEN_BYTES // NUM_STEPS, 1))
    index = bisect_left(places, True, key=lambda place: len(fitted(place).ids) <= limit)
    if index == len(places):
        raise _too_long(len(fitted(places[-1]).ids), limit, "without earlier turns the last one")
    return fitted(places[index])


def _places(sizes: list[int], step: int) -> list[int]:
    """The numbers of turns that may be dropped: up to the first end after each multiple of ``step``
    bytes, or all but the last."""
    ends = [0, *accumulate(sizes[:-1])]
    places = [num for num in range(1, len(ends)) if ends[num - 1] // step < ends[num] // step]
    last = len(sizes) - 1
    return places if places and places[-1] == last else [*places, last]


def _too_long(num_tokens: int, limit: int, turn: str) -> InvalidRequest:
    return InvalidRequest(
        f"{turn} has {num_tokens} tokens with the instructions before it; the limit is {limit}"
        " (history-limit, and room for max_tokens)",
        param="prompt",
        code="context_length_exceeded",
    )
