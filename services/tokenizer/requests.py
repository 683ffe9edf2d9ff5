"""The requests of gateways, from Submit to the end: prompts go down, text comes up."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext

from msgspec.structs import replace

from services.tokenizer.chat.template_options import num_chars
from services.tokenizer.conversions import Conversions
from services.tokenizer.deliver import deliver
from services.tokenizer.guide_maker import GuideMaker, wants_guide
from services.tokenizer.lanes import Lanes
from services.tokenizer.media_reader import MediaReader, PromptMedia
from services.tokenizer.metrics import ENCODED_TOKENS, PREPARE_SECONDS
from services.tokenizer.observer import Observer
from services.tokenizer.outbox import Outbox
from services.tokenizer.prepare import Prepared, prepare
from services.tokenizer.request_table import OpenRequest, RequestTable
from services.tokenizer.schedulers import Schedulers
from services.tokenizer.text_model import TextModel
from shared.errors import (
    NO_SCHEDULER,
    RETRY_AFTER_S,
    CodecError,
    InternalError,
    Overloaded,
    RequestError,
    Unavailable,
)
from shared.link.credit import CreditBatch
from shared.link.peer import Peer
from shared.process.log import log_end
from shared.process.rate import Rate
from shared.wire.codec import Array
from shared.wire.faults import ids_fault
from shared.wire.messages import (
    Accepted,
    Convert,
    Failed,
    Generate,
    Grant,
    Guide,
    Lost,
    NewSequence,
    RequestKey,
    SamplingParams,
    Submit,
    Tokens,
)
from shared.wire.token_arrays import Layout, TokenArrays

log = logging.getLogger(__name__)


class Requests:
    """Encodes in ``lanes`` and decodes on the event loop; prompts go to ``schedulers``.

    ``max_tokens`` bounds texts without a bound from the client. At most ``max_open`` requests and
    conversions are open.
    """

    def __init__(
        self,
        text: TextModel,
        max_tokens: int | None,
        max_open: int,
        lanes: Lanes,
        tasks: asyncio.TaskGroup,
        schedulers: Schedulers,
        observer: Observer | None = None,
        guides: GuideMaker | None = None,
        media: MediaReader | None = None,
    ) -> None:
        self.num_deliveries = 0
        self._text = text
        self._max_tokens = max_tokens
        self._max_open = max_open
        self._lanes = lanes
        self._tasks = tasks
        self._schedulers = schedulers
        self._guides = guides or GuideMaker()
        self._media = media or MediaReader()
        self._open = RequestTable(observer, self._note_pop)
        self._conversions = Conversions(text, lanes, tasks, self._note_ends, self._media)
        self._credits = CreditBatch()
        self._ends = Rate()
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open) + len(self._conversions)

    async def close(self) -> None:
        await self._guides.close()
        await self._media.close()

    async def idle(self) -> None:
        """Returns when nothing is open."""
        self._note_ends()
        await self._idle.wait()

    def lose(self, peer: Peer) -> None:
        """A gateway's requests are cancelled; a scheduler's go back to their gateways."""
        lost: dict[Peer, list[RequestKey]] = defaultdict(list)
        for request in self._open.pop_all_of(peer):
            if peer is request.gateway:
                request.cancel()
            else:
                lost[request.gateway].append(request.key)
        self._conversions.lose(peer)
        for gateway, keys in lost.items():
            gateway.send(Lost(keys, peer.is_explained, peer.hello.instance))
        self._note_ends()

    def hand_over(self, scheduler: Peer, lost: Lost) -> None:
        """Prompts that ``scheduler`` leaves to other cells go back to their gateways."""
        keys: dict[Peer, list[RequestKey]] = defaultdict(list)
        for key in lost.keys:
            request = self._open.get(key.request, key.attempt)
            if request is not None and request.scheduler is scheduler:
                self._open.pop(request, "handed_over")
                keys[request.gateway].append(key)
        for gateway, own in keys.items():
            gateway.send(replace(lost, keys=own, scheduler=scheduler.hello.instance))
        self._note_ends()

    # --- down ---------------------------------------------------------------------------------

    def submit(
        self, gateway: Peer, submit: Submit, prompt: Array, resumed: Array, *files: Array
    ) -> None:
        """Raises CodecError for another number of ``files`` than the message has media."""
        _check_files(submit, files)
        try:
            self._check(submit, prompt)
        except RequestError as error:
            gateway.send(error.to_failed(submit.request, submit.attempt))
            log_end("prompt ended", submit.request, attempt=submit.attempt, reason=error.code)
            return
        if not self._open:
            self._ends.start(time.monotonic())
        request = OpenRequest(submit, gateway)
        self._open.add(request)
        work = self._encode_and_send(request, prompt, resumed, files)
        request.encoding = self._tasks.create_task(work)

    def grant(self, gateway: Peer, grants: list[Grant]) -> None:
        for grant in grants:
            found = self._open.by_sequence(grant.request, grant.attempt)
            if found is not None and found[0].gateway is gateway and found[0].scheduler is not None:
                self._credits.add(found[0].scheduler, grant)

    def cancel(self, gateway: Peer, keys: list[RequestKey]) -> None:
        """Requests and conversions of this gateway."""
        for key in keys:
            request = self._open.get(key.request, key.attempt)
            if request is not None and request.gateway is gateway:
                self._open.pop(request, "cancelled")
                self._ends.note(1, time.monotonic())
                request.cancel()
            elif request is None:
                self._conversions.cancel(gateway, key.request)
        self._note_ends()

    def abort(self, ids: list[str], owner: str) -> None:
        """Ends the requests of ``owner`` with these ids, each choice with its text so far."""
        outbox = Outbox(Layout([], TokenArrays()))
        for request in self._open.named(set(ids), owner):
            request.cancel()
            self._open.pop(request, "abort")
            if request.scheduler is None:
                outbox.add_unbegun(request, "abort")
            for choice in request.choices.values():
                outbox.add_end(request, choice, choice.finish(), "abort")
        outbox.send()
        self._note_ends()

    def convert(self, gateway: Peer, message: Convert, data: Array, *files: Array) -> None:
        """Raises CodecError like ``submit``."""
        _check_files(message, files)
        try:
            self._check_room()
            self._text.check_size(message.kind, data)
            self._conversions.begin(gateway, message, data, files)
        except RequestError as error:
            gateway.send(error.to_failed(message.request, 0))

    def _check(self, submit: Submit, prompt: Array) -> None:
        if self._open.get(submit.request, submit.attempt) is not None:
            raise InternalError(f"there is a request {submit.request} already")
        self._check_room()
        is_cut = submit.text.max_prompt_tokens is not None
        self._text.check_size(submit.kind, prompt, is_cut)

    def _check_room(self) -> None:
        if len(self) >= self._max_open:
            raise Overloaded(
                f"{self._max_open} requests are open at this tokenizer; the limit is"
                " max-open-requests",
                retry_after_s=self._ends.retry_after_s(time.monotonic()),
            )

    async def _encode_and_send(
        self, request: OpenRequest, prompt: Array, resumed: Array, files: Sequence[Array]
    ) -> None:
        try:
            with await self._read(request, files) as media:
                num_bytes = resumed.nbytes + num_chars(request.submit.chat)
                num_bytes += prompt.nbytes if request.submit.kind != "ids" else 0
                prepared = await self._lanes.run(
                    request.options.owner,
                    num_bytes,
                    lambda: self._prepare(request, prompt, resumed, media),
                )
                ENCODED_TOKENS.inc(len(prepared.ids))
                guide = await self._guide_of(request, prepared)
                if request in self._open:
                    self._generate(request, prepared, replace(prepared.params, guide=guide))
        except RequestError as error:
            self._fail(request, error)
        except Exception:  # one request fails, and no other
            log.exception("request %s cannot be encoded", request.request)
            self._fail(request, InternalError("the prompt could not be encoded"))

    async def _read(self, request: OpenRequest, files: Sequence[Array]) -> PromptMedia:
        submit, options = request.submit, request.options
        with request.observer.measure("read") if files else nullcontext():
            return await self._media.read(submit, files, options.salt, options.owner)

    async def _guide_of(self, request: OpenRequest, prepared: Prepared) -> Guide | None:
        if not wants_guide(request.submit):
            return None
        with request.observer.measure("format"):
            return await self._guides.guide_of(
                request.submit, prepared.start, request.note_left_out, request.options.owner
            )

    def _prepare(
        self, request: OpenRequest, prompt: Array, resumed: Array, media: PromptMedia
    ) -> Prepared:
        started_s = time.monotonic()
        request.observer.note_thread()
        prepared = prepare(
            self._text,
            request.submit,
            prompt,
            resumed,
            self._max_tokens,
            request.observer.measure,
            media,
        )
        request.prepare_s = time.monotonic() - started_s
        PREPARE_SECONDS.observe(request.prepare_s)
        return prepared

    def _generate(self, request: OpenRequest, prepared: Prepared, params: SamplingParams) -> None:
        generate = Generate(
            request=request.request,
            attempt=request.attempt,
            params=params,
            sequences=[
                NewSequence(
                    request=request.sequence(start.choice).request,
                    choice=start.choice,
                    num_emitted=start.num_ids,
                    num_prompt_scored=start.num_prompt_scored,
                )
                for start in request.submit.choices
            ],
            options=request.submit.options,
            items=prepared.items,
        )
        scheduler = self._schedulers.choose(generate, request.options, prepared.ids)
        if scheduler is None:
            raise Unavailable(
                "no scheduler is connected", code=NO_SCHEDULER, retry_after_s=RETRY_AFTER_S
            )
        request.scheduler = scheduler
        request.num_prompt_tokens = len(prepared.ids)
        accepted = Accepted(
            request=request.request,
            attempt=request.attempt,
            start=prepared.start,
            dropped=prepared.dropped,
            left_out=request.left_out,
            media=prepared.media,
        )
        request.answer = accepted, prepared.ids
        request.choices = {choice.index: choice for choice in prepared.choices}
        scheduler.send(generate, prepared.ids, prepared.resumed, *prepared.pixels)

    # --- up -----------------------------------------------------------------------------------

    def accept(self, accepted: Accepted) -> None:
        request = self._open.get(accepted.request, accepted.attempt)
        if request is not None and request.answer is not None:
            request.gateway.send(*request.answer)
            request.answer = None

    def fail(self, failed: Failed) -> None:
        """Ends all choices, because a request without one of them is worthless."""
        error = RequestError.from_failed(failed)
        refused = self._open.get(failed.request, failed.attempt)
        if refused is not None:
            self._fail(refused, error)
        elif found := self._open.by_sequence(failed.request, failed.attempt):
            request, choice = found
            del request.choices[choice.index]
            request.cancel()
            self._fail(request, error)

    def deliver(self, tokens: Tokens, arrays: TokenArrays) -> None:
        """Raises CodecError for a message that no scheduler of ours sends."""
        for ids in (arrays.ids, arrays.top_ids):
            if fault := ids_fault(ids, self._text.vocab_size):
                raise CodecError(f"the tokens have {fault}")
        ended = deliver(tokens, arrays, self._open)
        self._ends.note(len(ended), time.monotonic())
        self.num_deliveries += 1
        self._note_ends()

    def _note_pop(self, request: OpenRequest) -> None:
        if request.scheduler is not None:
            self._schedulers.note_end(request.scheduler, len(request.submit.choices))

    def _fail(self, request: OpenRequest, error: RequestError) -> None:
        if request in self._open:
            self._open.pop(request, error.code)
            request.gateway.send(error.to_failed(request.request, request.attempt))
        self._note_ends()

    def _note_ends(self) -> None:
        if reports := self._open.observer.take_reports():
            outbox = Outbox(Layout([], TokenArrays()))
            for gateway, report in reports:
                outbox.add_spans(gateway, report)
            outbox.send()
        if len(self):
            self._idle.clear()
        else:
            self._idle.set()


def _check_files(message: Submit | Convert, files: Sequence[Array]) -> None:
    if len(files) != len(message.media):
        raise CodecError(f"{len(files)} files came for {len(message.media)} media")
