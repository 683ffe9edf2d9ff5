"""Replies of ``/v1/responses``: whole ones, and the events of streamed ones. Pure.

Both have the same items; a stream also has the events of their progress.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec

from services.gateway.apis.responses.replies.objects import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    Status,
)
from services.gateway.apis.responses.replies.open_items import ItemEvent
from services.gateway.apis.responses.replies.output_items import ItemShape, OutputItems
from services.gateway.apis.responses.replies.token_updates import TokenUpdates
from services.gateway.chat.replies.chat_parts import merged_events
from services.gateway.chat.replies.choice_parser import ChoiceParser
from services.gateway.chat.replies.logprob_json import ChatLogprobs, tokens_of
from services.gateway.chat.replies.reply import Reply, Tally
from services.gateway.chat.replies.writers import HEARTBEAT
from services.gateway.http.json_reply import encode
from services.gateway.mesh.output_collector import ChoiceUpdate
from shared.errors import RequestError
from shared.wire.messages import FinishReason

structs = msgspec.structs

_STATUSES: dict[FinishReason, Status] = {
    "stop": "completed",
    "length": "incomplete",
    "repetition": "incomplete",
    "abort": "cancelled",
}
_DETAILS: dict[FinishReason, IncompleteDetails] = {
    "length": IncompleteDetails("max_output_tokens"),
    "repetition": IncompleteDetails("repetition"),
}


class ResponseMaker:
    """``response`` is the response so far: in progress, with the ended items, until all updates
    have come."""

    def __init__(
        self, reply: Reply, parser: ChoiceParser, shape: ItemShape, response: ResponseObject
    ) -> None:
        self._items = OutputItems(shape)
        self.response = structs.replace(response, output=self._items.items)
        self._tally = Tally(reply)
        self._choice = parser
        self._tokens: TokenUpdates | None = None
        if reply.shows_logprobs and reply.spelling is not None:
            self._tokens = TokenUpdates(reply.spelling.table)
            self._logprobs = ChatLogprobs(reply.spelling)
        self._waiting: list[bytes] = []  # logprobs of tokens without text so far

    @property
    def is_over(self) -> bool:
        return self._choice.is_over

    def add(self, update: ChoiceUpdate) -> Iterator[ItemEvent]:
        if self._tokens is None:
            yield from self._add(update)
            return
        for each in self._tokens.split(update):
            yield from self._add(each)

    def fail(self, error: RequestError) -> None:
        """Ends the response with its items so far."""
        for _ in self._items.finish(is_cut=True):
            pass
        self.response = structs.replace(
            self.response, status="failed", error=ResponseError(error.code, error.message)
        )

    def _add(self, update: ChoiceUpdate) -> Iterator[ItemEvent]:
        events, update = self._choice.push(update)
        self._tally.add(update, self._choice)
        if self._tokens is not None and (events or not update.marks):
            self._waiting += [b"".join(self._logprobs.entry(each)) for each in tokens_of([update])]
        for event in merged_events(events):
            logprobs, self._waiting = self._waiting, []
            yield from self._items.add(event, logprobs)
        if update.finished is not None:
            yield from self._finish(update)

    def _finish(self, update: ChoiceUpdate) -> Iterator[ItemEvent]:
        assert update.finished is not None
        reason = update.finished.reason
        is_cut = reason != "stop"
        yield from self._items.finish(is_cut or self._choice.has_open_call)
        self.response = structs.replace(
            self.response,
            status=_STATUSES[reason],
            incomplete_details=_DETAILS.get(reason),
            usage=self._usage(),
        )

    def _usage(self) -> ResponseUsage:
        usage = self._tally.usage()
        of_prompt = usage.prompt_tokens_details
        return ResponseUsage(
            usage.prompt_tokens,
            InputDetails(
                of_prompt.cached_tokens,
                dropped_tokens=of_prompt.dropped_tokens,
                dropped_turns=of_prompt.dropped_turns,
            ),
            usage.completion_tokens,
            OutputDetails(self._choice.num_reasoning_tokens or 0),
            usage.total_tokens,
        )


class ResponseBody:
    """A BodyWriter."""

    is_large = False

    def __init__(self, maker: ResponseMaker) -> None:
        self._maker = maker

    def add(self, update: ChoiceUpdate) -> None:
        for _ in self._maker.add(update):
            pass

    def is_over(self, update: ChoiceUpdate) -> bool:
        return self._maker.is_over

    def write(self) -> Iterator[bytes]:
        yield encode(self._maker.response)


class ResponseStream:
    """A StreamWriter."""

    heartbeat = HEARTBEAT

    def __init__(self, maker: ResponseMaker) -> None:
        self._maker = maker
        self._numbers = count()

    def open(self) -> bytes:
        response = self._maker.response
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response}
        )

    def write(self, update: ChoiceUpdate) -> Iterator[bytes]:
        for kind, fields in self._maker.add(update):
            yield self._event(kind, fields)

    def is_over(self, update: ChoiceUpdate) -> bool:
        return self._maker.is_over

    def close(self) -> bytes:
        """An aborted response ends as incomplete: there is no event for an abort."""
        response = self._maker.response
        kind = "completed" if response.status == "completed" else "incomplete"
        return self._event(f"response.{kind}", {"response": response})

    def fail(self, error: RequestError) -> bytes:
        self._maker.fail(error)
        return self._event("response.failed", {"response": self._maker.response})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = {"type": kind, "sequence_number": next(self._numbers)} | fields
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(data))
