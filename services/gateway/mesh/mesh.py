"""The gateway's end of the mesh: sends prompts to tokenizers and their messages to collectors."""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

import numpy as np

from services.gateway.mesh.conversions import Conversions
from services.gateway.mesh.job import Job
from services.gateway.mesh.observer import UNOBSERVED, RequestObserver
from services.gateway.mesh.open_prompt import Failure, OpenPrompt
from services.gateway.mesh.output_collector import ChoiceUpdate, OutputCollector
from services.gateway.mesh.token_table import TokenTable
from services.gateway.mesh.tokenizers import Tokenizer, Tokenizers
from services.gateway.metrics import REPLAYS
from shared.errors import (
    NO_SCHEDULER,
    NO_WORKER,
    RETRY_AFTER_S,
    CodecError,
    Overloaded,
    RequestError,
    Unavailable,
)
from shared.link.credit import CreditBatch
from shared.link.extension import Extension, is_taken
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.faults import ids_fault, logprobs_fault
from shared.wire.messages import (
    Abort,
    Accepted,
    Cancel,
    Converted,
    Deltas,
    Failed,
    Lost,
    Message,
    ModelInfo,
    RequestKey,
    SpanReport,
    Vocabulary,
)
from shared.wire.token_arrays import Layout, TokenArrays

log = logging.getLogger(__name__)

TRANSIENT = {429, 503}


class Mesh:
    """Sends each prompt to one tokenizer and its messages to the prompt's OutputCollector.

    Messages about what is not open at the tokenizer that sent them, such as an old attempt, are
    ignored. A prompt whose tokenizer or scheduler is lost is replayed through any tokenizer that is
    ready within ``replay_s``; a new request waits ``ready_wait_s`` for one. ``on_report`` is called
    with reports of the services about requests. ``extensions`` get messages of optional parts.
    """

    def __init__(self, replay_s: float, ready_wait_s: float, accept_timeout_s: float) -> None:
        self.on_report: Callable[[SpanReport], None] = lambda report: None
        self.extensions: Sequence[Extension] = ()
        self._lost_changed = asyncio.Event()  # a prompt was lost, or a tokenizer has changed
        self.tokenizers = Tokenizers(ready_wait_s, self._lost_changed.set)
        self.conversions = Conversions(self.tokenizers, accept_timeout_s)
        self._replay_s = replay_s
        self._ready_wait_s = ready_wait_s
        self._lost = LostPrompts()
        self._credits = CreditBatch()
        self._tokens: TokenTable | None = None
        self._fingerprint = ""  # of the model that the tokens belong to

    async def run(self) -> None:
        """Replays lost prompts until cancelled."""
        while True:
            self._lost_changed.clear()
            now_s, is_ready = time.monotonic(), bool(self.tokenizers.ready())
            for prompt in self._lost.take_due(now_s, is_ready):
                self._submit_again(prompt, now_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lost.pause_s(now_s, is_ready)):
                    await self._lost_changed.wait()

    @property
    def tokens(self) -> TokenTable:
        """The texts of all tokens. Raises Unavailable until a tokenizer has sent its vocabulary."""
        if self._tokens is None:
            raise self.tokenizers.unavailable()
        return self._tokens

    @contextmanager
    def generate(
        self, name: str, job: Job, observer: RequestObserver = UNOBSERVED
    ) -> Iterator[OutputCollector]:
        """Submits the prompts of ``job``; leaving the context cancels what has not ended.

        Raises RequestError, mostly Unavailable.
        """
        num_prompts = len(job.prompts)
        collector = OutputCollector(num_prompts, job.num_choices, job.has_prompt_logprobs)
        observer.begin(name)
        collector.observer = observer
        prompts = [
            OpenPrompt(f"{name}/{number}", number, job, collector) for number in range(num_prompts)
        ]
        collector.consumed = lambda update: self._consumed(
            prompts[update.index // job.num_choices], update
        )
        collector.cut = lambda index: self._cut(
            prompts[index // job.num_choices], index % job.num_choices
        )
        waiting = deque(prompts[job.max_open_prompts :] if job.max_open_prompts else ())
        for prompt in prompts:
            prompt.on_end = lambda: self._submit_next(waiting)
        try:
            for prompt in prompts[: job.max_open_prompts]:
                self._submit(prompt)
            yield collector
        finally:
            self._cancel(prompts)

    def abort(self, public_ids: set[str], owner: str) -> set[str]:
        """Ends ``owner``'s requests with these ``public_ids``, and returns the ids of our own. The
        other ids are sent to the tokenizers: other gateways may have them."""
        prompts = [
            prompt
            for prompt in self._prompts()
            if prompt.public_id in public_ids and prompt.owner == owner
        ]
        self._cancel(prompts)
        for prompt in prompts:
            prompt.abort()
        ours = {prompt.public_id for prompt in prompts}
        if others := sorted(public_ids - ours):
            for tokenizer in self.tokenizers:
                tokenizer.peer.send(Abort(others, owner))
        return ours

    def fail_all(self, reason: str) -> None:
        """Ends every open request with an error."""
        for prompt in self._prompts():
            prompt.fail(Unavailable(reason, retry_after_s=RETRY_AFTER_S))

    # --- the link -----------------------------------------------------------------------------

    def on_up(self, peer: Peer) -> None:
        self.tokenizers.add(peer)
        if peer.stood_still:
            self._forgive(f"{peer}")
        for each in self.extensions:
            each.on_up(peer)

    def on_down(self, peer: Peer, reason: str) -> None:
        tokenizer = self.tokenizers.remove(peer)
        for each in self.extensions:
            each.on_down(peer)
        for prompt in tokenizer.prompts.values():
            self._replay(prompt, peer.is_explained)
        error = Unavailable(f"the {peer} is gone: {reason}", retry_after_s=RETRY_AFTER_S)
        self.conversions.fail_all(tokenizer, error)

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        """Raises CodecError for ids that are not in the model's vocabulary, and for media that a
        prompt does not have."""
        tokenizer = self.tokenizers[peer]
        check_arrays(message, arrays, tokenizer.model.vocab_size)
        prompts = tokenizer.prompts
        match message:
            case Deltas():
                self._deliver(prompts, message, TokenArrays(*arrays))
            case Accepted(request, attempt, start, dropped, left_out, media):
                if prompt := prompts.get(RequestKey(request, attempt)):
                    prompt.accept(arrays[0], start, dropped, left_out, media)
                    tokenizer.probation.succeed()
                    self._note_accepted(prompt)
            case Failed(request, attempt):
                if prompt := prompts.pop(RequestKey(request, attempt), None):
                    self._fail(prompt, RequestError.from_failed(message), tokenizer)
                else:
                    self.conversions.fail(tokenizer, message)
            case Lost(keys, is_explained, scheduler, num_worker_deaths):
                for key in keys:
                    if prompt := prompts.pop(key, None):
                        prompt.note_handover(scheduler, num_worker_deaths)
                        self._replay(prompt, is_explained, scheduler)
                if not keys and is_explained:
                    self._forgive(f"scheduler {scheduler}")
            case Converted():
                self.conversions.finish(tokenizer, message, arrays[0])
            case Vocabulary():
                self._learn_tokens(tokenizer.model, arrays)
            case _ if not is_taken(self.extensions, peer, message):
                log.warning("%s sent a %s, which we do not read", peer, type(message).__name__)

    def _learn_tokens(self, model: ModelInfo, arrays: list[Array]) -> None:
        """Makes the table once for a model: the JSON of its tokens takes time."""
        if model.fingerprint != self._fingerprint:
            self._fingerprint = model.fingerprint
            self._tokens = TokenTable(*arrays)

    # --- prompts -----------------------------------------------------------------------------

    def _submit_again(self, prompt: OpenPrompt, now_s: float) -> None:
        """A prompt that no tokenizer can have yet waits until its time is over."""
        try:
            self._submit(prompt)
        except RequestError as error:
            if now_s < prompt.replay_until_s:
                self._lost.add(prompt, now_s)
            else:
                prompt.fail(error)

    def _submit(self, prompt: OpenPrompt, tokenizer: Tokenizer | None = None) -> None:
        """Raises RequestError, mostly Unavailable, if no tokenizer is named and none can have
        it."""
        tokenizer = tokenizer or self.tokenizers.least_loaded(prompt.options, prompt.minor)
        prompt.peer = tokenizer.peer
        prompt.note_sent(time.monotonic())
        tokenizer.prompts[prompt.key] = prompt
        message, arrays = prompt.submit()
        prompt.peer.send(message, *arrays)

    def _note_accepted(self, prompt: OpenPrompt) -> None:
        """The prompt was accepted, so the earlier failure is the other tokenizer's fault."""
        failed, prompt.failure = prompt.failure, None
        if failed is not None and (tokenizer := self.tokenizers.get(failed.peer)):
            tokenizer.note_failure(failed.error)

    def _submit_next(self, waiting: deque[OpenPrompt]) -> None:
        """Submits a further prompt of a request in the mesh: if there is no room, it waits like a
        replay."""
        if not waiting:
            return
        prompt, now_s = waiting.popleft(), time.monotonic()
        prompt.is_replay, prompt.replay_until_s = True, now_s + self._replay_s
        try:
            self._submit(prompt)
        except RequestError:
            self._lost.add(prompt, now_s)
            self._lost_changed.set()

    def _replay(self, prompt: OpenPrompt, is_explained: bool, scheduler: str = "") -> None:
        now_s = time.monotonic()
        try:
            prompt.begin_replay(now_s, is_explained, scheduler)
        except RequestError as error:
            prompt.fail(error)
            return
        REPLAYS.inc()
        prompt.replay_until_s = now_s + self._replay_s
        self._lost.add(prompt, now_s)
        self._lost_changed.set()

    def _forgive(self, service: str) -> None:
        for prompt in self._prompts():
            prompt.losses.forgive(service)

    def _fail(self, prompt: OpenPrompt, error: RequestError, tokenizer: Tokenizer) -> None:
        """Sends the prompt to another tokenizer, once, if this one may have failed by its own
        fault. Otherwise ends the prompt, or submits it again later while the mesh is starting: this
        applies to replays, and to requests from before the loss of the scheduler or the last worker
        was known."""
        now_s = time.monotonic()
        other = self.tokenizers.other_for(tokenizer, error, prompt.options, prompt.minor)
        if other is not None and prompt.failure is None and not prompt.is_accepted:
            prompt.failure = Failure(tokenizer.peer, error)
            prompt.note_end(now_s, error.code)
            prompt.begin_attempt()
            self._submit(prompt, other)
            return
        is_early = error.code in (NO_SCHEDULER, NO_WORKER)
        if is_early and not prompt.replay_until_s:
            prompt.replay_until_s = now_s + self._ready_wait_s
        may_wait = now_s < prompt.replay_until_s and (prompt.is_replay or is_early)
        if prompt.is_accepted or error.status not in TRANSIENT or not may_wait:
            prompt.fail(error)
            return
        prompt.note_end(now_s, error.code)
        prompt.begin_attempt()
        is_full = error.status == Overloaded.status  # else retry_after_s is a guess
        self._lost.add(prompt, now_s, error.retry_after_s or 0.0 if is_full else 0.0)
        self._lost_changed.set()

    def _deliver(
        self, prompts: dict[RequestKey, OpenPrompt], deltas: Deltas, arrays: TokenArrays
    ) -> None:
        layout = Layout(deltas.rows, arrays)
        for index, row in enumerate(deltas.rows):
            if prompt := prompts.get(RequestKey(row.request, row.attempt)):
                try:
                    prompt.add(row, layout.part(index, index + 1))
                except RequestError as error:
                    self._cancel([prompt])
                    prompt.fail(error)
        for finished in deltas.finished:
            key = RequestKey(finished.request, finished.attempt)
            if prompt := prompts.get(key):
                prompt.finish(finished)
                if not prompt.choices:
                    self._end(prompt)
        for report in deltas.spans:
            self.on_report(report)

    def _consumed(self, prompt: OpenPrompt, update: ChoiceUpdate) -> None:
        grant = prompt.take(update)
        if grant is not None and prompt.peer is not None:
            self._credits.add(prompt.peer, grant)

    def _cut(self, prompt: OpenPrompt, choice: int) -> None:
        if prompt.cut(choice) and not prompt.choices:
            self._end(prompt)

    def _end(self, prompt: OpenPrompt) -> None:
        """All choices have ended here; the tokenizer still works on the cut ones."""
        if prompt.has_cut:
            self._cancel([prompt])
        elif prompt.peer is not None:
            prompt.note_end(time.monotonic())
            del self.tokenizers[prompt.peer].prompts[prompt.key]
        prompt.on_end()

    def _cancel(self, prompts: list[OpenPrompt]) -> None:
        keys: dict[Peer, list[RequestKey]] = defaultdict(list)
        for prompt in prompts:
            self._lost.discard(prompt)
            if prompt.peer is None:
                continue
            tokenizer = self.tokenizers.get(prompt.peer)
            if tokenizer is not None and prompt.key in tokenizer.prompts:
                del tokenizer.prompts[prompt.key]
                keys[prompt.peer].append(prompt.key)
        for peer, cancelled in keys.items():
            peer.send(Cancel(cancelled))

    def _prompts(self) -> list[OpenPrompt]:
        open_prompts = chain.from_iterable(each.prompts.values() for each in self.tokenizers)
        return [*open_prompts, *self._lost]


def check_arrays(message: Message, arrays: list[Array], vocab_size: int) -> None:
    """Raises CodecError."""
    match message:
        case Deltas():
            ids, values, top_ids, _ = TokenArrays(*arrays)
            _refuse(ids_fault(ids, vocab_size) or ids_fault(top_ids, vocab_size))
            _refuse(logprobs_fault(values))
        case Accepted() | Converted():
            if arrays[0].dtype == np.int32:
                _refuse(ids_fault(arrays[0], vocab_size))
        case Vocabulary():
            data, lengths = arrays
            total = int(lengths.sum(dtype=np.int64))
            if len(lengths) != vocab_size or (lengths < 0).any() or total != len(data):
                raise CodecError(
                    f"{len(lengths)} tokens of {total} bytes; {vocab_size} of {len(data)} belong"
                )


def _refuse(fault: str | None) -> None:
    if fault is not None:
        raise CodecError(fault)


class LostPrompts:
    """Times are monotonic. Pure.

    A prompt is due when its pause or its time to wait is over; while no tokenizer is ready, only
    the latter counts.
    """

    def __init__(self) -> None:
        self._prompts: dict[OpenPrompt, None] = {}

    def __iter__(self) -> Iterator[OpenPrompt]:
        return iter(self._prompts)

    def add(self, prompt: OpenPrompt, now_s: float, at_least_s: float = 0.0) -> None:
        prompt.backoff.wait(now_s, at_least_s)
        self._prompts[prompt] = None

    def discard(self, prompt: OpenPrompt) -> None:
        self._prompts.pop(prompt, None)

    def take_due(self, now_s: float, is_ready: bool) -> list[OpenPrompt]:
        due = [prompt for prompt in self._prompts if _due_s(prompt, is_ready) <= now_s]
        for prompt in due:
            del self._prompts[prompt]
        return due

    def pause_s(self, now_s: float, is_ready: bool) -> float | None:
        """Seconds until the next one is due."""
        due_s = min((_due_s(prompt, is_ready) for prompt in self._prompts), default=None)
        return None if due_s is None else due_s - now_s


def _due_s(prompt: OpenPrompt, is_ready: bool) -> float:
    return (
        min(prompt.backoff.retry_at_s, prompt.replay_until_s) if is_ready else prompt.replay_until_s
    )
