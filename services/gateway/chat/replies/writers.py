"""OpenAI's replies as bytes: whole ones, and the events of streamed ones. Pure.

Writers yield pieces, since logprobs may make a reply large; see ``pieces.py``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from msgspec import UNSET, Raw, UnsetType

from services.gateway.chat.replies.chat_parts import ChatParts, merged_events
from services.gateway.chat.replies.choice_parser import ChoiceParser, Content, Event
from services.gateway.chat.replies.formats import Output
from services.gateway.chat.replies.logprob_json import PIECE_ENTRIES
from services.gateway.chat.replies.openai import NOTHING_SHOWN, ChatDelta, Choice, ShownPrompt
from services.gateway.chat.replies.reply import Reply, Tally
from services.gateway.http.json_reply import DONE, encode, error_event, event
from services.gateway.mesh.output_collector import ChoiceUpdate, merged
from shared.errors import RequestError
from shared.wire.messages import NO_TOKENS, Finished
from shared.wire.token_arrays import TokenArrays

HEARTBEAT = b": waiting\n\n"  # a comment, which clients pass over

_HOLE = b"\0"  # no JSON contains it
_LOGPROBS = Raw(_HOLE)
# Objects around a token are larger than their content, so several become one; tokens with many
# logprobs are not merged, since a copy of them takes longer.
_NUM_MERGED = 32
_MAX_MERGED_BYTES = 16 << 10


class BodyWriter(Protocol):
    """Progress to the body of a reply that is not streamed."""

    def add(self, update: ChoiceUpdate) -> None:
        """Keeps the update's part of the reply."""

    def is_over(self, update: ChoiceUpdate) -> bool:
        """Whether the reply ignores later output of the choice."""

    @property
    def is_large(self) -> bool: ...

    def write(self) -> Iterator[bytes]:
        """The body, once every choice has ended."""


class StreamWriter(Protocol):
    """Progress to events; a ``heartbeat`` is sent after a long silence."""

    heartbeat: bytes

    def open(self) -> bytes:
        """Before the first update."""

    def write(self, update: ChoiceUpdate) -> Iterator[bytes]:
        """All events of ``update``."""

    def is_over(self, update: ChoiceUpdate) -> bool:
        """As in BodyWriter."""

    def close(self) -> bytes:
        """Once every choice has ended."""

    def fail(self, error: RequestError) -> bytes:
        """The last event of the stream, in place of all unwritten ones."""


class _WholeChoice:
    """Events and tokens of one choice."""

    def __init__(self, parser: ChoiceParser, echo: str) -> None:
        self.parser = parser
        self.events: list[Event] = [Content(echo)] if echo else []
        self.updates: list[ChoiceUpdate] = []  # with tokens or drafts
        self.finished: Finished | None = None
        self._num_merged_events = 0  # the later ones are not merged yet
        self._num_loose_updates = 0  # the last ones, which are not merged yet

    def keep_events(self, events: list[Event]) -> None:
        self.events += events
        if len(self.events) - self._num_merged_events > _NUM_MERGED:
            begin = self._num_merged_events
            self.events[begin:] = merged_events(self.events[begin:])
            self._num_merged_events = len(self.events)

    def keep_tokens(self, update: ChoiceUpdate) -> None:
        self.updates.append(update)
        is_small = update.num_bytes <= _MAX_MERGED_BYTES
        self._num_loose_updates = self._num_loose_updates + 1 if is_small else 0
        if self._num_loose_updates == _NUM_MERGED:
            self.updates[-_NUM_MERGED:] = [merged(self.updates[-_NUM_MERGED:])]
            self._num_loose_updates = 0


class WholeWriter:
    """A BodyWriter of the older endpoints: a reply is the sum of the events of its choices."""

    def __init__(self, reply: Reply, parsers: Sequence[ChoiceParser]) -> None:
        self._reply = reply
        self._choices = [
            _WholeChoice(parser, reply.echo(index)) for index, parser in enumerate(parsers)
        ]
        self._of_prompts: list[list[ChoiceUpdate]] = [[] for _ in reply.job.prompts]
        self._parts = ChatParts(reply.reasoning_field, reply.job.parsing)
        self._tally = Tally(reply)
        self._num_entries = 0

    def add(self, update: ChoiceUpdate) -> None:
        """Keeps the update's part of the reply."""
        num_choices = self._reply.job.num_choices
        if update.of_prompt:
            self._num_entries += len(update.arrays.values) * num_choices
            self._of_prompts[update.index // num_choices].append(update)
            return
        choice = self._choices[update.index]
        events, update = choice.parser.push(update)
        choice.keep_events(events)
        choice.finished = update.finished
        self._tally.add(update, choice.parser)
        if not self._reply.shows_tokens:
            update = replace(update, run=NO_TOKENS, arrays=TokenArrays())
        if update.num_tokens or update.drafts.num:
            self._num_entries += update.num_entries
            self._num_entries += update.num_tokens if self._reply.job.returns_ids else 0
            choice.keep_tokens(replace(update, text="", marks=()))

    def is_over(self, update: ChoiceUpdate) -> bool:
        """Whether the reply ignores later output of the choice."""
        return self._choices[update.index].parser.is_over

    @property
    def is_large(self) -> bool:
        return self._num_entries > PIECE_ENTRIES

    def write(self) -> Iterator[bytes]:
        """The body, once every choice has ended."""
        reply = self._reply
        choices = [
            reply.format.whole(self._output(index, choice), self._parts.message(choice.events))
            for index, choice in enumerate(self._choices)
        ]
        usage = self._tally.usage()
        body = reply.completion(
            reply.format.object,
            choices,
            usage,
            reply.shown_prompt(0),
            self._prompt_hole(),
        )
        yield from _filled(encode(body), self._logprobs())

    def _output(self, index: int, choice: _WholeChoice) -> Output:
        reply, finished = self._reply, choice.finished
        assert finished is not None
        return Output(
            index=index,
            logprobs=_LOGPROBS if reply.shows_logprobs else None,
            finished=finished,
            finish_reason=choice.parser.finish_reason(finished),
            token_ids=reply.token_ids(choice.updates),
            prompt=reply.shown_prompt(index),
            draft_logprobs=_LOGPROBS if reply.job.params.draft_logprobs else UNSET,
            prompt_logprobs=self._prompt_hole(),
        )

    def _prompt_hole(self) -> Raw | UnsetType:
        return UNSET if self._reply.job.num_prompt_logprobs is None else _LOGPROBS

    def _logprobs(self) -> Iterator[Iterator[bytes]]:
        """For the holes, in order."""
        reply, drafts = self._reply, self._reply.draft_logprobs()
        for index, choice in enumerate(self._choices):
            of_prompt = self._of_prompts[index // reply.job.num_choices]
            if (writer := reply.logprobs(index)) is not None:
                echoed = of_prompt if reply.job.echoes else []
                yield writer.write([*echoed, *choice.updates])
            if drafts is not None:
                yield drafts.write(each.drafts for each in choice.updates)
            is_last = index + 1 == len(self._choices)
            prompts = reply.prompt_logprobs()
            if prompts is not None and (is_last or not reply.format.prompt_on_top):
                yield prompts.write(of_prompt)


class EventWriter:
    """A StreamWriter of the older endpoints. A choice has an opening, a chunk for each delta and a
    finish reason; then comes the usage, if the client asked, and [DONE]."""

    heartbeat = HEARTBEAT

    def __init__(self, reply: Reply, parsers: Sequence[ChoiceParser]) -> None:
        self._reply = reply
        self._parsers = parsers
        self._parts = ChatParts(reply.reasoning_field, reply.job.parsing)
        self._ends_apart = reply.job.parsing is not None
        self._shows_tokens = reply.shows_tokens
        self._no_usage = None if reply.job.includes_usage else UNSET
        self._logprobs = [reply.logprobs(index) for index in range(len(parsers))]
        self._draft_logprobs = reply.draft_logprobs()
        self._unbegun = set(range(len(parsers)))
        self._num_open = len(parsers)
        self._tally = Tally(reply)

    def open(self) -> bytes:
        return b""

    def close(self) -> bytes:
        return b""

    def fail(self, error: RequestError) -> bytes:
        return error_event(error) + DONE

    def is_over(self, update: ChoiceUpdate) -> bool:
        """As in WholeWriter."""
        return self._parsers[update.index].is_over

    def write(self, update: ChoiceUpdate) -> Iterator[bytes]:
        """All events of ``update``; none while a character is incomplete. Logprobs of a prompt go
        to each of its choices."""
        if update.of_prompt:
            for index in range(update.index, update.index + self._reply.job.num_choices):
                yield from self._write(replace(update, index=index), [])
            return
        parser = self._parsers[update.index]
        events, update = parser.push(update)
        self._tally.add(update, parser)
        yield from self._write(update, events)

    def _write(self, update: ChoiceUpdate, events: list[Event]) -> Iterator[bytes]:
        """A chunk for each delta: the first has the tokens of ``update``, the last has its end."""
        if not (deltas := self._deltas(update, events)):
            return
        index, finished = update.index, update.finished
        is_first = index in self._unbegun
        if is_first:
            yield from self._begin_choice(index, deltas[0])
        for delta in deltas[:-1]:
            yield from self._chunk(replace(update, finished=None), delta, is_first)
            update = ChoiceUpdate(index, "", NO_TOKENS, TokenArrays(), finished)
            is_first = False
        yield from self._chunk(update, deltas[-1], is_first)
        if finished is not None:
            yield from self._end_choice()

    def _deltas(self, update: ChoiceUpdate, events: list[Event]) -> list[ChatDelta]:
        """Empty ones hold tokens without text, or an end: of a parsed text it stands apart."""
        deltas = self._parts.deltas(events)
        if not deltas and self._shows_tokens and update.num_tokens:
            deltas.append(ChatDelta())
        if update.finished is not None and (self._ends_apart or not deltas):
            deltas.append(ChatDelta())
        return deltas

    def _begin_choice(self, index: int, delta: ChatDelta) -> Iterator[bytes]:
        """Puts an echo before the text of ``delta``, the first one."""
        self._unbegun.discard(index)
        if echo := self._reply.echo(index):
            delta.content = echo + (delta.content or "")
        # Clients begin a text of their own with any content, be it empty.
        is_call = delta.tool_calls or delta.function_call
        if opening := self._reply.format.opening(index, None if is_call else ""):
            yield from self._event([opening], self._reply.shown_prompt(index))

    def _end_choice(self) -> Iterator[bytes]:
        self._num_open -= 1
        if self._num_open:
            return
        if self._no_usage is not UNSET:
            chunk = self._reply.completion(self._reply.format.chunk_object, [], self._tally.usage())
            yield event(chunk)
        yield DONE

    def _chunk(self, update: ChoiceUpdate, delta: ChatDelta, is_first: bool) -> Iterator[bytes]:
        reply, index, finished = self._reply, update.index, update.finished
        begins_prompt = is_first and reply.echoed_prompt(index) is not None
        writer = self._logprobs[index] if update.num_tokens or begins_prompt else None
        drafts = self._draft_logprobs if update.drafts.num else None
        reason = None if finished is None else self._parsers[index].finish_reason(finished)
        output = Output(
            index=index,
            logprobs=_LOGPROBS if writer is not None else None,
            finished=finished,
            finish_reason=reason,
            token_ids=reply.token_ids([update]),
            prompt=reply.shown_prompt(index) if is_first else NOTHING_SHOWN,
            draft_logprobs=_LOGPROBS if drafts is not None else UNSET,
        )
        logprobs = [writer.write([update])] if writer is not None else []
        logprobs += [drafts.write([update.drafts])] if drafts is not None else []
        yield from self._event([reply.format.chunk(output, delta)], NOTHING_SHOWN, logprobs)

    def _event(
        self,
        choices: list[Choice],
        prompt: ShownPrompt,
        logprobs: Iterable[Iterator[bytes]] = (),
    ) -> Iterator[bytes]:
        reply = self._reply
        usage = self._tally.usage_so_far() if reply.job.repeats_usage else self._no_usage
        chunk = reply.completion(reply.format.chunk_object, choices, usage, prompt)
        yield from _filled(event(chunk), logprobs)


def is_large(update: ChoiceUpdate) -> bool:
    """Whether its events should be made in pieces."""
    return update.num_entries > PIECE_ENTRIES


def _filled(encoded: bytes, logprobs: Iterable[Iterator[bytes]]) -> Iterator[bytes]:
    """``encoded`` with its holes filled, each by the next of ``logprobs``."""
    first, *others = encoded.split(_HOLE)
    yield first
    for pieces, other in zip(logprobs, others, strict=True):
        yield from pieces
        yield other
