"""OpenAI's replies as bytes: whole ones, and the events of streamed ones. Pure.

Writers yield pieces, for logprobs may make a reply large; see ``pieces.py``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from msgspec import UNSET, Raw, UnsetType

from services.gateway.chat.replies.formats import Output
from services.gateway.chat.replies.logprob_json import PIECE_ENTRIES
from services.gateway.chat.replies.openai import NOTHING_SHOWN, ChatDelta, Choice, ShownPrompt
from services.gateway.chat.replies.reply import Reply, Tally
from services.gateway.http.error_json import error_event
from services.gateway.http.json_reply import DONE, encode, event
from services.gateway.mesh.output_collector import ChoiceUpdate, merged
from shared.errors import RequestError
from shared.wire.messages import NO_TOKENS
from shared.wire.token_arrays import TokenArrays

HEARTBEAT = b": waiting\n\n"  # a comment, which clients pass over

_HOLE = b"\0"  # no JSON contains it
_LOGPROBS = Raw(_HOLE)
# The objects around a token are larger than what they hold, so that many become one; but for those
# with many logprobs, of which a copy takes longer.
_NUM_MERGED = 32
_MAX_MERGED_BYTES = 16 << 10


class BodyWriter(Protocol):
    """Progress to the body of a reply that is not streamed."""

    def add(self, update: ChoiceUpdate) -> None:
        """Keeps what the reply will hold."""

    def is_over(self, update: ChoiceUpdate) -> bool:
        """Whether what follows of the choice would not be in the reply."""

    @property
    def is_large(self) -> bool: ...

    def write(self) -> Iterator[bytes]:
        """The body, once every choice has ended."""


class StreamWriter(Protocol):
    """Progress to events; a ``heartbeat`` is sent where nothing else is for long."""

    heartbeat: bytes

    def open(self) -> bytes:
        """Before the first update."""

    def write(self, update: ChoiceUpdate) -> Iterator[bytes]:
        """All that ``update`` gives to send."""

    def is_over(self, update: ChoiceUpdate) -> bool:
        """As in BodyWriter."""

    def close(self) -> bytes:
        """Once every choice has ended."""

    def fail(self, error: RequestError) -> bytes:
        """What ends the stream in place of all that has not been written."""


class WholeWriter:
    """A BodyWriter of the older endpoints."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._progresses: list[list[ChoiceUpdate]] = [[] for _ in range(reply.job.total_choices)]
        self._num_loose = [0] * reply.job.total_choices  # the last ones, which are not merged yet
        self._of_prompts: list[list[ChoiceUpdate]] = [[] for _ in reply.job.prompts]
        self._tally = Tally(reply)
        self._num_entries = 0

    def add(self, update: ChoiceUpdate) -> None:
        """Keeps what the reply will hold."""
        num_choices = self._reply.job.num_choices
        if update.of_prompt:
            self._num_entries += len(update.arrays.values) * num_choices
            self._of_prompts[update.index // num_choices].append(update)
            return
        self._tally.add(update)
        if not self._reply.shows_tokens:
            update = replace(update, run=NO_TOKENS, arrays=TokenArrays())
        self._num_entries += update.num_entries
        self._num_entries += update.num_tokens if self._reply.job.returns_ids else 0
        self._keep(update.index, update)

    def _keep(self, index: int, update: ChoiceUpdate) -> None:
        kept = self._progresses[index]
        kept.append(update)
        is_small = update.num_bytes <= _MAX_MERGED_BYTES
        self._num_loose[index] = self._num_loose[index] + 1 if is_small else 0
        if self._num_loose[index] == _NUM_MERGED:
            kept[-_NUM_MERGED:] = [merged(kept[-_NUM_MERGED:])]
            self._num_loose[index] = 0

    def is_over(self, update: ChoiceUpdate) -> bool:
        """Whether what follows of the choice would not be in the reply."""
        return False

    @property
    def is_large(self) -> bool:
        return self._num_entries > PIECE_ENTRIES

    def write(self) -> Iterator[bytes]:
        """The body, once every choice has ended."""
        reply = self._reply
        choices = [
            reply.format.whole(self._output(index, updates))
            for index, updates in enumerate(self._progresses)
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

    def _output(self, index: int, updates: list[ChoiceUpdate]) -> Output:
        reply = self._reply
        return Output(
            index=index,
            text=reply.echo(index) + "".join(each.text for each in updates),
            logprobs=_LOGPROBS if reply.shows_logprobs else None,
            finished=updates[-1].finished,
            finish_reason=_reason(updates[-1]),
            token_ids=reply.token_ids(updates),
            prompt=reply.shown_prompt(index),
            draft_logprobs=_LOGPROBS if reply.job.params.draft_logprobs else UNSET,
            prompt_logprobs=self._prompt_hole(),
        )

    def _prompt_hole(self) -> Raw | UnsetType:
        return UNSET if self._reply.job.num_prompt_logprobs is None else _LOGPROBS

    def _logprobs(self) -> Iterator[Iterator[bytes]]:
        """For the holes, in order."""
        reply, drafts = self._reply, self._reply.draft_logprobs()
        for index, updates in enumerate(self._progresses):
            of_prompt = self._of_prompts[index // reply.job.num_choices]
            if (writer := reply.logprobs(index)) is not None:
                echoed = of_prompt if reply.job.echoes else []
                yield writer.write([*echoed, *updates])
            if drafts is not None:
                yield drafts.write(each.drafts for each in updates)
            is_last = index + 1 == len(self._progresses)
            prompts = reply.prompt_logprobs()
            if prompts is not None and (is_last or not reply.format.prompt_on_top):
                yield prompts.write(of_prompt)


class EventWriter:
    """A StreamWriter of the older endpoints. A choice has an opening, texts and a finish reason;
    then comes the usage, if the client asked, and [DONE]."""

    heartbeat = HEARTBEAT

    def __init__(self, reply: Reply) -> None:
        num_choices = reply.job.total_choices
        self._reply = reply
        self._no_usage = None if reply.job.includes_usage else UNSET
        self._logprobs = [reply.logprobs(index) for index in range(num_choices)]
        self._draft_logprobs = reply.draft_logprobs()
        self._unbegun = set(range(num_choices))
        self._num_open = num_choices
        self._tally = Tally(reply)

    def open(self) -> bytes:
        return b""

    def close(self) -> bytes:
        return b""

    def fail(self, error: RequestError) -> bytes:
        return error_event(error) + DONE

    def write(self, update: ChoiceUpdate) -> Iterator[bytes]:
        """All that ``update`` gives to send; nothing while no whole character is there. Logprobs of
        a prompt go to each of its choices."""
        self._tally.add(update)
        if not update.of_prompt:
            yield from self._write(update)
            return
        for index in range(update.index, update.index + self._reply.job.num_choices):
            yield from self._write(replace(update, index=index))

    def _write(self, update: ChoiceUpdate) -> Iterator[bytes]:
        if not self._has_news(update):
            return
        is_first = update.index in self._unbegun
        if is_first:
            yield from self._begin_choice(update.index)
        yield from self._chunk(update, is_first)
        if update.finished is not None:
            yield from self._end_choice()

    def _begin_choice(self, index: int, content: str | None = "") -> Iterator[bytes]:
        self._unbegun.discard(index)
        if opening := self._reply.format.opening(index, content):
            yield from self._event([opening], self._reply.shown_prompt(index))

    def _end_choice(self) -> Iterator[bytes]:
        self._num_open -= 1
        if not self._num_open:
            yield from self._closing()

    def is_over(self, update: ChoiceUpdate) -> bool:
        """As in WholeWriter."""
        return False

    def _has_news(self, update: ChoiceUpdate) -> bool:
        shown_tokens = update.num_tokens if self._reply.shows_tokens else 0
        return bool(update.text or shown_tokens or update.finished)

    def _chunk(
        self,
        update: ChoiceUpdate,
        is_first: bool,
        delta: ChatDelta | None = None,
        finish_reason: str | None = None,
    ) -> Iterator[bytes]:
        reply, index = self._reply, update.index
        begins_prompt = is_first and reply.echoed_prompt(index) is not None
        writer = self._logprobs[index] if update.num_tokens or begins_prompt else None
        drafts = self._draft_logprobs if update.drafts.num else None
        output = Output(
            index=index,
            text=(reply.echo(index) if is_first else "") + update.text,
            logprobs=_LOGPROBS if writer is not None else None,
            finished=update.finished,
            finish_reason=finish_reason or _reason(update),
            token_ids=reply.token_ids([update]),
            prompt=reply.shown_prompt(index) if is_first else NOTHING_SHOWN,
            draft_logprobs=_LOGPROBS if drafts is not None else UNSET,
            delta=delta,
        )
        logprobs = [writer.write([update])] if writer is not None else []
        logprobs += [drafts.write([update.drafts])] if drafts is not None else []
        yield from self._event([reply.format.chunk(output)], NOTHING_SHOWN, logprobs)

    def _closing(self) -> Iterator[bytes]:
        if self._no_usage is not UNSET:
            chunk = self._reply.completion(self._reply.format.chunk_object, [], self._tally.usage())
            yield event(chunk)
        yield DONE

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


def _reason(update: ChoiceUpdate) -> str | None:
    return update.finished.reason if update.finished is not None else None


def is_large(update: ChoiceUpdate) -> bool:
    """Whether its events are better made in pieces."""
    return update.num_entries > PIECE_ENTRIES


def _filled(encoded: bytes, logprobs: Iterable[Iterator[bytes]]) -> Iterator[bytes]:
    """``encoded`` with its holes filled, each by the next of ``logprobs``."""
    first, *others = encoded.split(_HOLE)
    yield first
    for pieces, other in zip(logprobs, others, strict=True):
        yield from pieces
        yield other
