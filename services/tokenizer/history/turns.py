"""The turns of a chat: a user's messages and all messages that answer them. Pure."""

from collections.abc import Callable

import msgspec

from services.tokenizer.chat.normalize import Message

INSTRUCTIONS = ("system", "developer")
RESULTS = ("tool", "function")


class Turns:
    """The turns of ``messages``, oldest first; ``len`` counts them and is at least 1.

    Messages of the system and of developers belong to no turn. Consecutive messages of a user are
    one turn, and a call is in the same turn as its result. Messages before the first user's are in
    the first turn.
    """

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages
        self._starts = _starts(messages)

    def __len__(self) -> int:
        return len(self._starts)

    def without_first(self, num: int) -> list[Message]:
        """The messages without the ``num`` oldest turns."""
        start = self._starts[num]
        return [
            message
            for index, message in enumerate(self._messages)
            if index >= start or message.get("role") in INSTRUCTIONS
        ]

    def sizes(self, media_size: Callable[[Message], int] = lambda message: 0) -> list[int]:
        """The bytes of each turn as JSON, plus ``media_size`` for its media."""
        ends = [*self._starts[1:], len(self._messages)]
        return [
            sum(
                len(msgspec.json.encode(message)) + media_size(message)
                for message in self._messages[start:end]
                if message.get("role") not in INSTRUCTIONS
            )
            for start, end in zip(self._starts, ends, strict=True)
        ]


def _starts(messages: list[Message]) -> list[int]:
    starts = [0]
    calls: dict[str, int] = {}  # the message of each call, by its id
    last_call: int | None = None
    has_user = is_answered = False
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "user":
            if is_answered:
                starts.append(index)
            has_user, is_answered = True, False
        elif role not in INSTRUCTIONS:
            is_answered = has_user
        for call_id in _call_ids(message):
            calls[call_id] = last_call = index
        if role in RESULTS:
            asked_by = calls.get(str(message.get("tool_call_id")), last_call)
            while asked_by is not None and starts[-1] > asked_by:
                starts.pop()
    return starts


def _call_ids(message: Message) -> list[str]:
    calls = message.get("tool_calls")
    ids = [str(call.get("id")) for call in calls or () if isinstance(call, dict)]
    return ["", *ids] if message.get("function_call") is not None else ids
