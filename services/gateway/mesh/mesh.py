"""The tokenizers a gateway is connected to, and the prompts that each of them works on."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count

from services.gateway.mesh.array_check import check_arrays
from services.gateway.mesh.lost_prompts import LostPrompts
from services.gateway.mesh.open_prompt import OpenPrompt
from services.gateway.mesh.output_collector import ChoiceUpdate, OutputCollector
from services.gateway.mesh.probation import Probation
from services.gateway.mesh.token_table import TokenTable
from services.gateway.metrics import REPLAYS
from services.gateway.requests.job import Job
from shared.codec import Array
from shared.credit import CreditBatch
from shared.errors import (
    NO_SCHEDULER,
    RETRY_AFTER_S,
    InternalError,
    Overloaded,
    RequestError,
    Unavailable,
)
from shared.messages import (
    Abort,
    Accepted,
    Cancel,
    Convert,
    Converted,
    Deltas,
    Failed,
    Hello,
    Lost,
    Message,
    ModelInfo,
    PromptKind,
    RequestKey,
    Vocabulary,
)
from shared.peer import Peer
from shared.same_model import difference
from shared.token_arrays import Layout, TokenArrays

log = logging.getLogger(__name__)

TRANSIENT = {429, 503}

OpenPrompts = dict[RequestKey, OpenPrompt]


class Mesh:
    """Sends each prompt to one tokenizer and brings what comes back to its OutputCollector.

    What belongs to nothing that is open at the peer that sent it, such as an old attempt, is
    ignored. A prompt whose tokenizer or scheduler is lost is replayed through whichever tokenizer
    is ready within ``replay_s``; a new request waits ``ready_wait_s`` for one. Nobody polls: who
    waits is woken when a tokenizer comes, goes or has another state.
    """

    def __init__(self, replay_s: float, ready_wait_s: float, accept_timeout_s: float) -> None:
        self._replay_s = replay_s
        self._ready_wait_s = ready_wait_s
        self._accept_timeout_s = accept_timeout_s
        self._open: dict[Peer, OpenPrompts] = {}
        self._probations: dict[Peer, Probation] = {}
        self._lost = LostPrompts()
        self._look = asyncio.Event()  # at those
        self._changed = asyncio.Event()  # which tokenizers there are, and their states
        self._conversions: dict[Peer, dict[str, asyncio.Future[Array]]] = {}
        self._credits = CreditBatch()
        self._tokens: TokenTable | None = None
        self._fingerprint = ""  # of the model whose tokens we know
        self._new_numbers = count()

    async def run(self) -> None:
        """Replays what was lost, until cancelled."""
        while True:
            self._look.clear()
            now_s, is_ready = time.monotonic(), bool(self._ready())
            for prompt in self._lost.take_due(now_s, is_ready):
                if is_ready:
                    self._submit(prompt)
                else:
                    prompt.fail(self._unavailable())
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lost.pause_s(now_s, is_ready)):
                    await self._look.wait()

    @property
    def model(self) -> ModelInfo:
        """The model that is served. Raises Unavailable as long as no tokenizer is connected."""
        for peer in self._open:
            return _model_of(peer)
        raise self._unavailable()

    async def known_model(self) -> ModelInfo:
        """``model``, for which a new request waits a little."""
        await self._wait_until(lambda: bool(self._open))
        return self.model

    async def ready_model(self) -> ModelInfo:
        """As ``known_model``, when requests can be served: a service that has just died, or has
        only begun, is there again in a moment."""
        await self._wait_until(lambda: bool(self._ready()))
        return self.model

    @property
    def tokenizers(self) -> list[Peer]:
        """Those that are connected, ready or not."""
        return list(self._open)

    @property
    def tokens(self) -> TokenTable:
        """How tokens are written. Raises Unavailable until a tokenizer has sent its vocabulary."""
        if self._tokens is None:
            raise self._unavailable()
        return self._tokens

    @property
    def obstacle(self) -> str | None:
        """Why no request can be served now, or None."""
        if not self._open:
            return "no tokenizer is connected"
        if self._ready():
            return None
        return "; ".join(f"{peer}: {peer.status.reason}" for peer in self._open)

    @contextmanager
    def generate(self, name: str, job: Job) -> Iterator[OutputCollector]:
        """Submits the prompts of ``job``; leaving the context cancels what has not ended.

        Raises Unavailable.
        """
        num_prompts = len(job.prompts)
        collector = OutputCollector(num_prompts, job.num_choices, job.has_prompt_logprobs)
        prompts = [
            OpenPrompt(f"{name}/{number}", number, job, collector) for number in range(num_prompts)
        ]
        collector.on_consumed = lambda update: self._consumed(
            prompts[update.index // job.num_choices], update
        )
        try:
            for prompt in prompts:
                self._submit(prompt)
            yield collector
        finally:
            self._cancel(prompts)

    async def convert(self, kind: PromptKind, data: Array, adds_special_tokens: bool) -> Array:
        """Ids of a text or a chat, [n] int32; of ids the UTF-8 bytes of their text, [n] uint8.

        Raises RequestError, Unavailable after ``accept_timeout_s``. Whoever stops waiting cancels
        it.
        """
        peer = self._least_loaded()
        name = f"convert-{next(self._new_numbers)}"
        answer: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
        self._conversions[peer][name] = answer
        try:
            peer.send(Convert(name, kind, adds_special_tokens), data)
            async with asyncio.timeout(self._accept_timeout_s):
                return await answer
        except TimeoutError:
            text = f"not converted within {self._accept_timeout_s:g} s (accept-timeout-s)"
            raise Unavailable(text, retry_after_s=RETRY_AFTER_S) from None
        finally:
            if self._conversions.get(peer, {}).pop(name, None) and not _is_answered(answer):
                peer.send(Cancel([RequestKey(name, 0)]))

    def abort(self, public_ids: set[str], owner: str) -> set[str]:
        """Ends the requests that ``owner`` knows by these ids, and returns those that are ours; of
        the others, which may be other gateways', the tokenizers are told."""
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
            for peer in self._open:
                peer.send(Abort(others, owner))
        return ours

    def fail_all(self, reason: str) -> None:
        """Ends every open request with an error, where its client can still be told."""
        for prompt in self._prompts():
            prompt.fail(Unavailable(reason, retry_after_s=RETRY_AFTER_S))

    # --- the link -----------------------------------------------------------------------------

    def refusal(self, hello: Hello) -> str | None:
        if hello.model is None or not hello.model.names:
            return "a tokenizer must tell its model and a name for it"
        return next(filter(None, (difference(hello, peer.hello) for peer in self._open)), None)

    def on_up(self, peer: Peer) -> None:
        self._open[peer] = {}
        self._conversions[peer] = {}
        self._probations[peer] = Probation()
        peer.on_state = self._note_change
        self._note_change()

    def on_down(self, peer: Peer, reason: str) -> None:
        del self._probations[peer]
        for prompt in self._open.pop(peer).values():
            self._replay(prompt, is_planned=peer.said_bye)
        self._note_change()
        error = Unavailable(f"the {peer} is gone: {reason}", retry_after_s=RETRY_AFTER_S)
        for answer in self._conversions.pop(peer).values():
            _end(answer, error)

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        """Raises CodecError for ids that are none of the model's."""
        check_arrays(message, arrays, _model_of(peer).vocab_size)
        prompts = self._open[peer]
        match message:
            case Deltas():
                self._deliver(prompts, message, TokenArrays(*arrays))
            case Accepted(request, attempt):
                if prompt := prompts.get(RequestKey(request, attempt)):
                    self._probations[peer].succeed()
                    prompt.accept(arrays[0])
            case Failed(request, attempt):
                if prompt := prompts.pop(RequestKey(request, attempt), None):
                    if not prompt.is_accepted:
                        self._note_failure(peer, message)
                    self._fail(prompt, RequestError.from_failed(message))
                elif answer := self._conversions[peer].get(request):
                    self._note_failure(peer, message)
                    _end(answer, RequestError.from_failed(message))
            case Lost(keys, is_planned, scheduler):
                for key in keys:
                    if prompt := prompts.pop(key, None):
                        self._replay(prompt, is_planned, scheduler)
            case Converted(request):
                if answer := self._conversions[peer].get(request):
                    self._probations[peer].succeed()
                    _end(answer, arrays[0])
            case Vocabulary():
                self._learn_tokens(_model_of(peer), arrays)
            case _:
                log.warning("%s sent a %s, which we do not read", peer, type(message).__name__)

    def _learn_tokens(self, model: ModelInfo, arrays: list[Array]) -> None:
        """Once for a model: making the JSON of its tokens takes time."""
        if model.fingerprint != self._fingerprint:
            self._fingerprint = model.fingerprint
            self._tokens = TokenTable(*arrays)

    # --- prompts -----------------------------------------------------------------------------

    def _submit(self, prompt: OpenPrompt) -> None:
        """Raises Unavailable."""
        prompt.peer = self._least_loaded()
        self._open[prompt.peer][prompt.key] = prompt
        prompt.peer.send(*prompt.submit())

    def _replay(self, prompt: OpenPrompt, is_planned: bool, scheduler: str = "") -> None:
        now_s = time.monotonic()
        try:
            prompt.begin_replay(now_s, is_planned, scheduler)
        except RequestError as error:
            prompt.fail(error)
            return
        REPLAYS.inc()
        prompt.replay_until_s = now_s + self._replay_s
        self._lost.add(prompt, now_s)
        self._look.set()

    def _fail(self, prompt: OpenPrompt, error: RequestError) -> None:
        """What is refused for now tries again while the mesh is putting itself together: a replay,
        and a request whose tokenizer had lost its scheduler before we knew of it."""
        now_s = time.monotonic()
        is_early = error.code == NO_SCHEDULER
        if is_early and not prompt.replay_until_s:
            prompt.replay_until_s = now_s + self._ready_wait_s
        may_wait = now_s < prompt.replay_until_s and (prompt.is_replay or is_early)
        if prompt.is_accepted or error.status not in TRANSIENT or not may_wait:
            prompt.fail(error)
            return
        prompt.begin_attempt()
        is_full = error.status == Overloaded.status  # else nobody knows when to come back
        self._lost.add(prompt, now_s, error.retry_after_s or 0.0 if is_full else 0.0)
        self._look.set()

    def _note_failure(self, peer: Peer, failed: Failed) -> None:
        """A tokenizer that breaks what was not accepted yet may break everything."""
        if failed.status != InternalError.status:
            return
        if self._probations[peer].is_over:
            log.warning("%s failed a request (%s): it is on probation", peer, failed.code)
        self._probations[peer].fail(time.monotonic())

    def _deliver(self, prompts: OpenPrompts, deltas: Deltas, arrays: TokenArrays) -> None:
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
                    del prompts[key]

    def _consumed(self, prompt: OpenPrompt, update: ChoiceUpdate) -> None:
        grant = prompt.take(update)
        if grant is not None and prompt.peer is not None:
            self._credits.add(prompt.peer, grant)

    def _cancel(self, prompts: list[OpenPrompt]) -> None:
        keys: dict[Peer, list[RequestKey]] = defaultdict(list)
        for prompt in prompts:
            self._lost.discard(prompt)
            if prompt.peer is not None and prompt.key in self._open.get(prompt.peer, {}):
                del self._open[prompt.peer][prompt.key]
                keys[prompt.peer].append(prompt.key)
        for peer, cancelled in keys.items():
            peer.send(Cancel(cancelled))

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Raises Unavailable after ``ready_wait_s``."""
        try:
            async with asyncio.timeout(self._ready_wait_s):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            raise self._unavailable() from None

    def _note_change(self) -> None:
        """Wakes everybody who waits, once."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._look.set()

    def _prompts(self) -> list[OpenPrompt]:
        at_peers = chain.from_iterable(prompts.values() for prompts in self._open.values())
        return [*at_peers, *self._lost]

    def _ready(self) -> list[Peer]:
        return [peer for peer in self._open if peer.is_ready]

    def _least_loaded(self) -> Peer:
        ready = self._ready()
        if not ready:
            raise self._unavailable()
        now_s = time.monotonic()
        good = [peer for peer in ready if self._probations[peer].admits(self._load(peer)[0], now_s)]
        return min(good or ready, key=self._load)

    def _load(self, peer: Peer) -> tuple[int, int]:
        """What of ours is open there, then what it told of itself."""
        return len(self._open[peer]) + len(self._conversions[peer]), peer.status.load

    def _unavailable(self) -> Unavailable:
        return Unavailable(self.obstacle or "no model is known", retry_after_s=RETRY_AFTER_S)


def _is_answered(answer: asyncio.Future[Array]) -> bool:
    return answer.done() and not answer.cancelled()


def _end(answer: asyncio.Future[Array], outcome: Array | RequestError) -> None:
    """Nothing is left to do where whoever waited has gone."""
    if answer.done():
        return
    if isinstance(outcome, RequestError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _model_of(tokenizer: Peer) -> ModelInfo:
    """Without one none is let in."""
    assert tokenizer.hello.model is not None
    return tokenizer.hello.model
