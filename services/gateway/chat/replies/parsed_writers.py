"""Replies to chats whose text is divided into reasoning, content and calls. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from services.gateway.chat.replies.chat_parts import ChatParts, merged_events
from services.gateway.chat.replies.formats import Output
from services.gateway.chat.replies.openai import ChatDelta
from services.gateway.chat.replies.output_parser import ChoiceParser, OutputParser
from services.gateway.chat.replies.reply import Reply
from services.gateway.chat.replies.writers import EventWriter, WholeWriter
from services.gateway.mesh.output_collector import ChoiceUpdate
from services.gateway.text.events import Content, Event
from shared.wire.messages import NO_TOKENS
from shared.wire.token_arrays import TokenArrays

MAX_LOOSE_EVENTS = 32  # an object for each token would be larger than its text


def whole_writer(reply: Reply, parser: OutputParser | None) -> WholeWriter:
    return WholeWriter(reply) if parser is None else ParsedWholeWriter(reply, parser)


def event_writer(reply: Reply, parser: OutputParser | None) -> EventWriter:
    return EventWriter(reply) if parser is None else ParsedEventWriter(reply, parser)


class ParsedWholeWriter(WholeWriter):
    def __init__(self, reply: Reply, parser: OutputParser) -> None:
        super().__init__(reply)
        self._choices = _choices(reply, parser)
        self._reasons = parser.separates_reasoning
        self._shows_reasoning = self._reasons and parser.parsing.shows_reasoning
        self._events: list[list[Event]] = [_first_events(reply) for _ in self._choices]
        self._nums_merged = [0] * len(self._choices)
        self._finish_reasons: list[str | None] = [None] * len(self._choices)
        self._parts = ChatParts(parser.reasoning_field, parser.parsing.is_legacy)

    def add(self, update: ChoiceUpdate) -> None:
        if update.of_prompt:
            super().add(update)
            return
        index, choice = update.index, self._choices[update.index]
        events, update = choice.push(update)
        self._keep_events(index, events)
        if update.finished is not None:
            self._finish_reasons[index] = choice.finish_reason(update)
            if self._reasons:
                self._tally.add_reasoning(choice.num_reasoning_tokens)
        super().add(replace(update, text="", marks=()))

    def is_over(self, update: ChoiceUpdate) -> bool:
        return self._choices[update.index].is_over

    def _keep_events(self, index: int, events: list[Event]) -> None:
        kept, num_merged = self._events[index], self._nums_merged[index]
        kept += events
        if len(kept) - num_merged > MAX_LOOSE_EVENTS:
            kept[num_merged:] = merged_events(kept[num_merged:])
            self._nums_merged[index] = len(kept)

    def _output(self, index: int, updates: list[ChoiceUpdate]) -> Output:
        return replace(
            super()._output(index, updates),
            message=self._parts.message(self._events[index], self._shows_reasoning),
            finish_reason=self._finish_reasons[index],
        )


class ParsedEventWriter(EventWriter):
    def __init__(self, reply: Reply, parser: OutputParser) -> None:
        super().__init__(reply)
        self._choices = _choices(reply, parser)
        self._reasons = parser.separates_reasoning
        self._parts = ChatParts(parser.reasoning_field, parser.parsing.is_legacy)

    def is_over(self, update: ChoiceUpdate) -> bool:
        return self._choices[update.index].is_over

    def write(self, update: ChoiceUpdate) -> Iterator[bytes]:
        """A chunk for each delta. The tokens of ``update`` are in the first, be it empty, and the
        finish reason is in a last one of its own."""
        choice = self._choices[update.index]
        events, update = choice.push(update)
        self._tally.add(update)
        if update.index in self._unbegun:
            events = _first_events(self._reply) + events
        deltas = list(self._parts.deltas(events))
        if not deltas and self._reply.shows_tokens and update.num_tokens:
            deltas.append(ChatDelta())
        if update.finished is not None:
            if self._reasons:
                self._tally.add_reasoning(choice.num_reasoning_tokens)
            deltas.append(ChatDelta())
        if deltas and update.index in self._unbegun:
            # Clients begin a text of their own with any content, be it empty.
            is_call = deltas[0].tool_calls or deltas[0].function_call
            yield from self._begin_choice(update.index, None if is_call else "")
        finish_reason = choice.finish_reason(update)
        for number, delta in enumerate(deltas, 1 - len(deltas)):
            end = update.finished if number == 0 else None
            reason = finish_reason if number == 0 else None
            yield from self._chunk(replace(update, finished=end), False, delta, reason)
            update = ChoiceUpdate(update.index, "", NO_TOKENS, TokenArrays(), update.finished)
        if update.finished is not None:
            yield from self._end_choice()


def _choices(reply: Reply, parser: OutputParser) -> list[ChoiceParser]:
    num_choices, includes_stop = reply.job.num_choices, reply.job.text.includes_stop
    return [
        ChoiceParser(parser, index // num_choices, index, includes_stop)
        for index in range(reply.job.total_choices)
    ]


def _first_events(reply: Reply) -> list[Event]:
    return [Content(reply.job.first_text)] if reply.job.first_text else []
