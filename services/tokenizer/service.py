"""The tokenizer as a process: text down to ids, ids up to text."""

import asyncio
import logging
from collections.abc import Iterator

import msgspec
import numpy as np

from services.tokenizer.defaults import read_defaults
from services.tokenizer.lanes import Lanes
from services.tokenizer.requests import Requests
from services.tokenizer.text_model import ChatSettings, TextModel
from shared.codec import Array
from shared.config.tokenizer import TokenizerConfig
from shared.keys import load_keys
from shared.link import Link
from shared.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    Accepted,
    Cancel,
    Convert,
    Credit,
    Failed,
    Heartbeat,
    Hello,
    Message,
    ModelInfo,
    State,
    Submit,
    Tokens,
    Vocabulary,
)
from shared.model_location import locate_model
from shared.peer import Peer
from shared.pooling import read_served_model
from shared.token_arrays import TokenArrays

log = logging.getLogger(__name__)


class TokenizerService:
    """Encodes off the event loop, decodes on it; one message to each gateway for each step."""

    def __init__(self, config: TokenizerConfig) -> None:
        self._config = config
        self._lanes = Lanes(config.tokenizer_threads)
        self._is_draining = False
        self._link: Link | None = None
        self._requests: Requests | None = None

    async def run(self) -> None:
        model = await self._lanes.run(0, self._load)
        instance = self._config.instance
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "tokenizer", instance, model)
        self._link = Link(hello, self, load_keys(self._config.keys, "tokenizer"))
        try:
            async with asyncio.TaskGroup() as tasks:
                self._requests = Requests(
                    self._text,
                    self._max_tokens,
                    self._config.max_open_requests,
                    self._lanes,
                    tasks,
                    self._find_scheduler,
                )
                directory, addresses = self._config.mesh_dir, self._config.scheduler_address
                self._link.listen(directory, "gateway", tcp=self._config.listen_address)
                self._link.dial(
                    "scheduler", directory, role="tokenizers", tcp=addresses, takes_one=True
                )
                await self._link.run()
        finally:
            if self._requests is not None:
                await self._requests.close()
            await self._link.close("the tokenizer leaves", is_planned=self._is_draining)
            self._lanes.close()

    def _load(self) -> ModelInfo:
        config = self._config
        location = locate_model(config.model)
        names = config.served_model_name or [location.name]
        model = read_served_model(
            location.folder, names, config.max_model_len, config.runner, config.pooler_config
        )
        settings = ChatSettings(
            config.chat_template,
            config.trust_request_chat_template,
            config.tool_call_parser,
            config.reasoning_parser,
            config.pooler_config.classifier_from_token is not None,
        )
        self._text = TextModel(location.folder, model.max_model_len, model.vocab_size, settings)
        written = self._text.token_bytes()
        self._vocabulary = (
            np.frombuffer(b"".join(written), np.uint8),
            np.array([len(each) for each in written], np.int32),
        )
        defaults, self._max_tokens = read_defaults(location.folder, config.generation_config)
        return msgspec.structs.replace(
            model,
            defaults=defaults,
            tool_parser=self._text.tools.name if self._text.tools else "",
            reasoning_parser=self._text.reasoning.name if self._text.reasoning else "",
        )

    async def drain(self) -> None:
        self._is_draining = True
        if self._link is not None:
            self._link.send_status()
        if self._requests is not None:
            await self._requests.idle()

    def status(self) -> Heartbeat:
        state, reason = self._state()
        if self._requests is None:
            return Heartbeat(state, reason, load=0, num_steps=0)
        scheduler = self._find_scheduler()
        return Heartbeat(
            state,
            reason,
            len(self._requests),
            self._requests.num_deliveries,
            overview=scheduler.status.overview if scheduler is not None else None,
        )

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

    def _find_scheduler(self) -> Peer | None:
        return next(self._schedulers(), None)

    def refusal(self, hello: Hello) -> str | None:
        other = next(self._schedulers(), None)
        if hello.service == "scheduler" and other is not None:
            return f"attached to scheduler {other.hello.instance}, so not to {hello.instance}"
        return None

    def on_up(self, peer: Peer) -> None:
        if peer.hello.service == "gateway":
            peer.send(Vocabulary(), *self._vocabulary)

    def on_down(self, peer: Peer, reason: str) -> None:
        if self._requests is not None:
            self._requests.lose(peer)

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        requests = self._requests
        assert requests is not None
        match message, peer.hello.service:
            case Tokens(), "scheduler":
                requests.deliver(message, TokenArrays(*arrays))
            case Submit(), "gateway":
                requests.submit(peer, message, *arrays)
            case Accepted(), "scheduler":
                requests.accept(message)
            case Credit(grants), "gateway":
                requests.grant(peer, grants)
            case Cancel(keys), "gateway":
                requests.cancel(peer, keys)
            case Failed(), "scheduler":
                requests.fail(message)
            case Convert(), "gateway":
                requests.convert(peer, message, arrays[0])
            case Abort(ids, owner), "gateway":
                requests.abort(ids, owner)
            case _:
                log.warning("%s sent a %s, which is not for us", peer, type(message).__name__)
