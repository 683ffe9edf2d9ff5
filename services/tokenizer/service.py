"""The tokenizer as a process: text down to ids, ids up to text."""

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from services.tokenizer.open_requests import CHOICE, OpenRequest, OpenRequests
from services.tokenizer.outbox import Outbox
from services.tokenizer.text_model import TextModel
from services.tokenizer.text_stream import TextStream
from shared.codec import Array
from shared.config import TokenizerConfig
from shared.errors import RETRY_AFTER_S, InternalError, InvalidRequest, RequestError, Unavailable
from shared.link import Link
from shared.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Accepted,
    Cancel,
    Failed,
    FinishReason,
    Generate,
    Heartbeat,
    Hello,
    Message,
    State,
    Submit,
    Tokens,
)
from shared.model_folder import read_model_info
from shared.peer import Peer

log = logging.getLogger(__name__)


class TokenizerService:
    """Encodes off the event loop, decodes on it; one message to each gateway for each step."""

    def __init__(self, config: TokenizerConfig) -> None:
        self._config = config
        self._open = OpenRequests()
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, "encode")
        self._num_deltas = 0
        self._idle = asyncio.Event()
        self._is_draining = False
        self._link: Link | None = None

    async def run(self) -> None:
        self._model = read_model_info(
            self._config.model, self._config.served_model_name, self._config.max_model_len
        )
        loop = asyncio.get_running_loop()
        self._text = await loop.run_in_executor(
            self._threads, TextModel, self._config.model, self._model.max_model_len
        )
        instance = self._config.instance
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "tokenizer", instance, self._model)
        self._link = Link(hello, self)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._link.listen(self._config.mesh_dir, "gateway")
                self._link.dial("scheduler", self._config.mesh_dir, role="tokenizers")
                await self._link.run()
        finally:
            await self._link.close("the tokenizer leaves")
            self._threads.shutdown(wait=False)

    async def drain(self) -> None:
        self._is_draining = True
        if self._link is not None:
            self._link.tell_status()
        self._note_idle()
        await self._idle.wait()

    def status(self) -> Heartbeat:
        state, reason = self._state()
        return Heartbeat(state, reason, len(self._open), self._num_deltas)

    def _state(self) -> tuple[State, str]:
        if self._is_draining:
            return State.DRAINING, "finishing what is open"
        if self._link is None:
            return State.NOT_READY, "loading the tokenizer"
        schedulers = list(self._schedulers())
        if any(peer.is_ready for peer in schedulers):
            return State.READY, ""
        return State.NOT_READY, (
            schedulers[0].status.reason if schedulers else "no scheduler is connected"
        )

    def _schedulers(self) -> Iterator[Peer]:
        peers = self._link.peers if self._link is not None else ()
        return (peer for peer in peers if peer.hello.service == "scheduler")

    def refusal(self, hello: Hello) -> str | None:
        return None

    def on_up(self, peer: Peer) -> None:
        pass

    def on_down(self, peer: Peer, reason: str) -> None:
        for request in self._open.pop_all_of(peer):
            if peer is request.gateway:
                request.cancel()
            else:
                error = Unavailable(
                    "the scheduler was lost", code="scheduler_lost", retry_after_s=RETRY_AFTER_S
                )
                request.gateway.send(error.to_failed(request.request, request.attempt))
        self._note_idle()

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        match message:
            case Tokens():
                self._decode(message, arrays[0].tolist())
            case Submit():
                self._submit(peer, message, arrays[0])
            case Accepted():
                self._accept(message)
            case Cancel(keys):
                for key in keys:
                    self._cancel(key.request, key.attempt)
            case Failed():
                self._fail_sequence(message)
            case _:
                log.warning("%s sent a %s, which is not for us", peer, type(message).__name__)
        self._note_idle()

    # --- down ---------------------------------------------------------------------------------

    def _submit(self, gateway: Peer, submit: Submit, prompt: np.ndarray) -> None:
        stream = TextStream(lambda ids: self._text.decode(ids), submit.stop)
        request = OpenRequest(submit.request, submit.attempt, gateway, stream)
        self._open.add(request)
        request.encoding = self._tasks.create_task(self._encode_and_send(request, submit, prompt))

    async def _encode_and_send(
        self, request: OpenRequest, submit: Submit, prompt: np.ndarray
    ) -> None:
        try:
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self._threads, self._encode, submit, prompt)
            if request in self._open:
                self._generate(request, submit, ids)
        except RequestError as error:
            self._fail(request, error)
        except Exception:  # the edge of one request: nobody else may notice
            log.exception("request %s cannot be encoded", request.request)
            self._fail(request, InternalError("the prompt could not be encoded"))

    def _encode(self, submit: Submit, prompt: np.ndarray) -> np.ndarray:
        """[prompt_len] int32; runs on a thread."""
        match submit.kind:
            case "ids":
                ids = prompt
            case "text":
                ids = self._text.encode(prompt.tobytes().decode())
            case "chat":
                ids = self._text.encode_chat(msgspec.json.decode(prompt.tobytes()))
        if len(ids) == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if ids.max() >= self._model.vocab_size:
            raise InvalidRequest(
                f"the prompt holds token id {ids.max()}; the model has {self._model.vocab_size}",
                param="prompt",
            )
        return ids

    def _generate(self, request: OpenRequest, submit: Submit, ids: np.ndarray) -> None:
        scheduler = max(self._schedulers(), key=lambda peer: peer.is_ready, default=None)
        if scheduler is None:
            raise Unavailable("no scheduler is connected", retry_after_s=RETRY_AFTER_S)
        request.scheduler, request.num_prompt_tokens = scheduler, len(ids)
        name = request.sequence.request
        scheduler.send(Generate(name, request.attempt, CHOICE, submit.params), ids)

    def _cancel(self, name: str, attempt: int) -> None:
        request = self._open.get(name, attempt)
        if request is not None:
            self._open.pop(request)
            request.cancel()

    # --- up -----------------------------------------------------------------------------------

    def _accept(self, accepted: Accepted) -> None:
        request = self._open.by_sequence(accepted.request, accepted.attempt)
        if request is not None:
            request.gateway.send(
                Accepted(request.request, request.attempt, accepted.num_prompt_tokens)
            )

    def _fail_sequence(self, failed: Failed) -> None:
        request = self._open.by_sequence(failed.request, failed.attempt)
        if request is not None:
            self._fail(request, RequestError.from_failed(failed))

    def _fail(self, request: OpenRequest, error: RequestError) -> None:
        if request in self._open:
            self._open.pop(request)
            request.gateway.send(error.to_failed(request.request, request.attempt))
        self._note_idle()

    def _decode(self, tokens: Tokens, ids: list[int]) -> None:
        """Sends one Deltas to each gateway that has rows or ends in ``tokens``."""
        outbox = Outbox()
        start = 0
        for row in tokens.rows:
            end = start + row.num_tokens
            request = self._open.by_sequence(row.request, row.attempt)
            if request is not None:
                self._push(request, row.position, ids[start:end], outbox)
            start = end
        for finished in tokens.finished:
            request = self._open.by_sequence(finished.request, finished.attempt)
            if request is not None:
                outbox.add_text(request, request.stream.num_tokens, 0, request.stream.finish())
                self._end(request, finished.reason, outbox)
        outbox.send()
        self._num_deltas += 1

    def _push(self, request: OpenRequest, position: int, ids: list[int], outbox: Outbox) -> None:
        before = request.stream.num_tokens
        text = request.stream.push(ids)
        outbox.add_text(request, position, request.stream.num_tokens - before, text)
        if request.stream.has_stopped:
            request.cancel()
            self._end(request, "stop", outbox)

    def _end(self, request: OpenRequest, reason: FinishReason, outbox: Outbox) -> None:
        self._open.pop(request)
        outbox.add_finished(request, "stop" if request.stream.has_stopped else reason)

    def _note_idle(self) -> None:
        if self._open:
            self._idle.clear()
        else:
            self._idle.set()
