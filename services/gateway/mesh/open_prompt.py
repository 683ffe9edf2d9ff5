"""One prompt's way through the mesh, over all its attempts. Pure."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from services.gateway.mesh.job import Job
from services.gateway.mesh.losses import Backoff, Losses
from services.gateway.mesh.observer import UNOBSERVED, RequestObserver
from services.gateway.mesh.output_collector import ChoiceUpdate, OutputCollector
from shared.errors import CodecError, InternalError, RequestError
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import (
    MAX_TRACED,
    NOTHING_DROPPED,
    WINDOW_BYTES,
    WINDOW_TOKENS,
    ChoiceStart,
    Delta,
    Dropped,
    Finished,
    Grant,
    OutputStart,
    RequestKey,
    RunKind,
    Submit,
)
from shared.wire.token_arrays import TokenArrays, bytes_of

FIRST_PAUSE_S = 0.05  # other services may not have noticed the loss yet
MAX_PAUSE_S = 2.0
MAX_SEED = 1 << 63
NO_IDS = np.zeros(0, np.int32)


class _ChoiceState:
    """The gateway's tokens of one choice, and the part consumed by the client."""

    def __init__(self) -> None:
        self.ids = array("i")
        self.num_chars = 0
        self.num_marks = 0
        self.num_prompt_scored = 0  # tokens of the prompt
        self.num_cached: int | None = None  # kept: a replay finds the blocks of earlier attempts
        self.num_consumed = 0
        self._num_unconsumed_bytes = 0
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """The scheduler counts bytes anew, and grants a window beyond the resumed tokens."""
        self._num_bytes = 0
        self._granted_tokens = len(self.ids) + WINDOW_TOKENS
        self._granted_bytes = WINDOW_BYTES

    def add(self, row: Delta, part: TokenArrays) -> None:
        if self.num_cached is None:
            self.num_cached = row.num_cached
        match row.run.kind:
            case RunKind.PROMPT:
                self.num_prompt_scored += row.run.num_tokens
            case RunKind.OUTPUT:
                self.ids.frombytes(part.ids.tobytes())
        self.num_chars += len(row.text)
        self.num_marks += len(row.marks)
        num_bytes = bytes_of(row.run)
        self._num_bytes += num_bytes
        self._num_unconsumed_bytes += num_bytes

    def take(self, update: ChoiceUpdate) -> tuple[int, int] | None:
        """Returns the tokens and bytes to grant, once half a window has been taken."""
        self.num_consumed += 0 if update.of_prompt else update.num_tokens
        self._num_unconsumed_bytes -= update.num_bytes
        num_tokens = self.num_consumed + WINDOW_TOKENS
        num_bytes = self._num_bytes - self._num_unconsumed_bytes + WINDOW_BYTES
        is_due = (
            num_tokens - self._granted_tokens >= WINDOW_TOKENS // 2
            or num_bytes - self._granted_bytes >= WINDOW_BYTES // 2
        )
        if not is_due:
            return None
        self._granted_tokens = max(self._granted_tokens, num_tokens)
        self._granted_bytes = max(self._granted_bytes, num_bytes)
        return self._granted_tokens, self._granted_bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """A tokenizer's error for a prompt it did not accept: the fault may be its own."""

    peer: Peer
    error: RequestError


class OpenPrompt:
    """A prompt of an OutputCollector: its submission, and the place of its output.

    After the loss of a tokenizer or a scheduler, ``begin_replay`` and another ``submit`` continue
    the output. ``choices`` are the unfinished ones. ``peer`` is the tokenizer that works on it.
    Without a peer, ``backoff`` decides when to submit it again, and ``replay_until_s`` (monotonic)
    how long it may wait. ``losses`` are of tokenizers and schedulers, ``num_worker_deaths`` counts
    the workers in a cell that it has left. ``on_end`` is called when all of its choices have ended.
    """

    def __init__(self, request: str, number: int, job: Job, collector: OutputCollector) -> None:
        """``number`` counts the prompts of ``job``."""
        self.request = request
        self.attempt = 1
        self.losses = Losses()
        self.num_worker_deaths = 0
        self._left_scheduler = ""
        self.is_replay = False
        self.is_accepted = False
        self.has_cut = False  # a choice that has ended here and not in the mesh
        self.peer: Peer | None = None
        self.failure: Failure | None = None  # which another tokenizer is to judge
        self.replay_until_s = 0.0
        self.on_end: Callable[[], None] = lambda: None
        self.backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        self.choices = {index: _ChoiceState() for index in range(job.num_choices)}
        self._number = number
        self._job = job
        self._collector = collector
        self._prompt = job.prompts[number]
        self._params = job.params
        if not job.is_seeded:
            seed = (job.params.seed + number) % MAX_SEED
            self._params = msgspec.structs.replace(job.params, seed=seed)

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.request, self.attempt)

    @property
    def public_id(self) -> str:
        return self.request.partition("~")[0]

    @property
    def options(self) -> RequestOptions:
        return self._job.options

    @property
    def owner(self) -> str:
        return self.options.owner

    @property
    def minor(self) -> int:
        """As of its Prompt."""
        return self._prompt.minor

    def submit(self) -> tuple[Submit, list[Array]]:
        """The message of this attempt and its buffers."""
        starts = [
            ChoiceStart(
                choice=index,
                num_ids=len(choice.ids),
                num_chars=choice.num_chars,
                num_prompt_scored=choice.num_prompt_scored,
                num_marks=choice.num_marks,
            )
            for index, choice in self.choices.items()
        ]
        job = self._job
        options = msgspec.structs.replace(
            job.options,
            is_traced=self._observer.is_traced,
            num_worker_deaths=self.num_worker_deaths,
            left_scheduler=self._left_scheduler,
        )
        message = Submit(
            request=self.request,
            attempt=self.attempt,
            kind=self._prompt.kind,
            params=self._params,
            text=job.text,
            choices=starts,
            chat=job.chat,
            format=job.format,
            tool_choice=job.tool_choice,
            reasoning_budget=job.reasoning_budget,
            options=write_options(options),
            media=[each.medium for each in self._prompt.media],
            media_options=self._prompt.media_options,
        )
        resumed = b"".join(choice.ids.tobytes() for choice in self.choices.values())
        files = [each.data for each in self._prompt.media]
        return message, [self._prompt.data, np.frombuffer(resumed, np.int32), *files]

    def begin_replay(self, now_s: float, is_explained: bool = False, scheduler: str = "") -> None:
        """``is_explained``: see ``Peer``. ``scheduler``: the one that was lost, if it
        was not the tokenizer. Raises InternalError where too many were lost without any progress
        between: it may be the reason."""
        lost = f"scheduler {scheduler}" if scheduler else f"{self.peer}"
        if not is_explained:
            if scheduler:
                self.losses.lose_scheduler(lost, now_s)
            else:
                self.losses.lose_tokenizer(lost, self.is_accepted)
        self.is_replay = True
        self.backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        self._collector.num_replays += 1
        self.note_end(now_s, lost)
        self.begin_attempt()

    def note_handover(self, scheduler: str, num_worker_deaths: int) -> None:
        """Moves to another cell, with the number of workers that died while they computed it."""
        self._left_scheduler = scheduler
        self.num_worker_deaths = max(self.num_worker_deaths, num_worker_deaths)

    def note_sent(self, now_s: float) -> None:
        if self.peer is not None:
            tokenizer = self.peer.hello.instance
            self._observer.begin_attempt(self._number, self.attempt, tokenizer, now_s)

    def note_end(self, now_s: float, lost: str = "") -> None:
        """The attempt has ended, because of what was ``lost``, if anything was."""
        self._observer.end_attempt(self._number, self.attempt, lost, now_s)

    def begin_attempt(self) -> None:
        self.peer = None
        self.attempt += 1
        self.is_accepted = False
        for choice in self.choices.values():
            choice.begin_attempt()

    @property
    def _observer(self) -> RequestObserver:
        """Only the first prompts of a request are observed."""
        return self._collector.observer if self._number < MAX_TRACED else UNOBSERVED

    def accept(
        self,
        prompt_ids: Array,
        start: OutputStart = OutputStart.ANSWER,
        dropped: Dropped = NOTHING_DROPPED,
        left_out: Sequence[str] = (),
        media: Sequence[int] = (),
    ) -> None:
        """``media`` are the numbers of the submitted files that the ids stand for. Raises
        CodecError."""
        files = self._prompt.media
        if media and max(media) >= len(files):
            raise CodecError(f"medium {max(media)} of a prompt with {len(files)}")
        self.is_accepted = True
        kept = [files[number] for number in media]
        if self._prompt.kind != "pair":  # its ids alone lack the types of the second text
            self._prompt = replace(self._prompt, kind="ids", data=prompt_ids, media=kept)
        self._collector.accept(self._number, prompt_ids, start, dropped, left_out, media)

    def add(self, row: Delta, part: TokenArrays) -> None:
        choice = self.choices.get(row.choice)
        if choice is None:
            return
        of_prompt = row.run.kind == RunKind.PROMPT
        position = choice.num_prompt_scored if of_prompt else len(choice.ids)
        if row.position != position:
            owner = " of the prompt" if of_prompt else ""
            raise InternalError(
                f"token {row.position}{owner} of choice {row.choice} came where {position} belongs"
            )
        if row.run.num_tokens:
            self.losses.clear()
            self.num_worker_deaths = 0
            self._left_scheduler = ""
        choice.add(row, part)
        self._collector.add(self._index(row.choice), row, part)

    def finish(self, finished: Finished) -> None:
        """Ends a choice. A prompt that ends before it was accepted was aborted: its ids do not come
        any more, and it counts as accepted without them."""
        choice = self.choices.pop(finished.choice, None)
        if choice is not None:
            if choice.num_cached is not None:
                finished = msgspec.structs.replace(finished, num_cached=choice.num_cached)
            self._collector.finish(self._index(finished.choice), finished)
        if not self.choices and not self.is_accepted:
            self._collector.accept(self._number, NO_IDS)

    def abort(self) -> None:
        """Ends every choice with its tokens so far."""
        for index, choice in list(self.choices.items()):
            self.finish(Finished(self.request, self.attempt, index, "abort", len(choice.ids)))

    def cut(self, index: int) -> bool:
        """Ends a choice with its tokens so far, as if its text had ended. False: it had ended
        already."""
        if (choice := self.choices.get(index)) is None:
            return False
        self.has_cut = True
        self.finish(Finished(self.request, self.attempt, index, "stop", len(choice.ids)))
        return True

    def fail(self, error: RequestError) -> None:
        self._collector.fail(error, self._number)

    def take(self, update: ChoiceUpdate) -> Grant | None:
        """The client has ``update``: more credit for its choice, if enough is due."""
        number = update.index % self._job.num_choices
        choice = self.choices.get(number)
        due = choice.take(update) if choice is not None else None
        return Grant(f"{self.request}/{number}", self.attempt, *due) if due else None

    def _index(self, choice: int) -> int:
        return self._number * self._job.num_choices + choice
