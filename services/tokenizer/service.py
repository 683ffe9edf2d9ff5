"""The tokenizer as a process: text down to ids, ids up to text."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from services.tokenizer.adapters.relay import AdapterRelay
from services.tokenizer.guide_maker import GuideMaker, MakeGuides
from services.tokenizer.guides.guides import guides_for
from services.tokenizer.lanes import Lanes
from services.tokenizer.media.reading import media_for
from services.tokenizer.media_reader import MakeMedia, MediaReader
from services.tokenizer.observer import Observer
from services.tokenizer.requests import Requests
from services.tokenizer.schedulers import Schedulers
from services.tokenizer.text_model import ChatSettings, TextModel
from services.tokenizer.traces.prompt_spans import Prompts
from shared.errors import ConfigError
from shared.link.extension import Extension, is_taken
from shared.link.keys import load_keys
from shared.link.link import Link
from shared.link.peer import Peer
from shared.model_folder import GENERATION_CONFIG_FILE, decode_json
from shared.model_location import locate_model
from shared.pooling import read_served_model
from shared.process.report import Inquiries, check_own, make_report
from shared.settings.tokenizer import TokenizerConfig
from shared.wire.codec import Array
from shared.wire.messages import (
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
    Inquire,
    Lost,
    Message,
    ModelInfo,
    SamplingDefaults,
    ServiceReport,
    State,
    Stats,
    Submit,
    Tokens,
    Vocabulary,
)
from shared.wire.sampling_fields import SamplingFields, with_fields
from shared.wire.token_arrays import TokenArrays

log = logging.getLogger(__name__)

OBSERVERS: tuple[type[Observer], ...] = (
    Prompts,
    Observer,
)
GUIDES: tuple[MakeGuides, ...] = (
    guides_for,
    lambda text, lanes: GuideMaker(),
)
MEDIA: tuple[MakeMedia, ...] = (
    media_for,
    lambda text, folder, config: MediaReader(),
)
"""Of each the first one serves."""
EXTENSIONS: list[Callable[[Schedulers], Extension]] = [
    AdapterRelay,
]


class TokenizerService:
    """Encodes off the event loop, decodes on it; one message to each gateway for each step."""

    def __init__(self, config: TokenizerConfig) -> None:
        self._config = config
        self._lanes = Lanes(config.tokenizer_threads)
        self._is_draining = False
        self._link: Link | None = None
        self._requests: Requests | None = None
        self._schedulers = Schedulers()
        self._extensions = [make(self._schedulers) for make in EXTENSIONS]
        self._inquiries = Inquiries()

    async def run(self) -> None:
        model = await self._lanes.run("", 0, self._load)
        instance = self._config.instance
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "tokenizer", instance, model)
        self._link = Link(hello, self, load_keys(self._config.keys, "tokenizer"))
        try:
            async with asyncio.TaskGroup() as tasks:
                self._requests = Requests(
                    text=self._text,
                    max_tokens=self._max_tokens,
                    max_open=self._config.max_open_requests,
                    lanes=self._lanes,
                    tasks=tasks,
                    schedulers=self._schedulers,
                    observer=OBSERVERS[0](self._config.instance),
                    guides=GUIDES[0](self._text, self._lanes),
                    media=self._media,
                )
                await self._run_link(self._link)
        finally:
            if self._requests is not None:
                await self._requests.close()
            self._lanes.close()

    async def _run_link(self, link: Link) -> None:
        """It is closed before the group of tasks that prompts begin ends."""
        directory, addresses = self._config.mesh_dir, self._config.scheduler_address
        try:
            link.listen(directory, "gateway", tcp=self._config.listen_address)
            link.dial("scheduler", directory, role="tokenizers", tcp=addresses)
            await link.run()
        finally:
            await link.close("the tokenizer leaves", is_planned=self._is_draining)

    def _load(self) -> ModelInfo:
        config = self._config
        location = locate_model(config.model)
        names = config.served_model_name or [location.name]
        model = read_served_model(
            location.folder, names, config.max_model_len, config.runner, config.pooler_config
        )
        settings = ChatSettings(
            template=config.chat_template,
            trusts_requests=config.trust_request_chat_template,
            tool_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            classifies_by_token=config.pooler_config.classifier_from_token is not None,
            template_kwargs=config.default_chat_template_kwargs,
        )
        self._text = TextModel(location.folder, model.max_model_len, model.vocab_size, settings)
        self._media = MEDIA[0](self._text, location.folder, config)
        written = self._text.token_bytes
        self._vocabulary = (
            np.frombuffer(b"".join(written), np.uint8),
            np.array([len(each) for each in written], np.int32),
        )
        defaults, self._max_tokens = read_defaults(
            location.folder, config.generation_config, config.override_generation_config
        )
        return msgspec.structs.replace(
            model,
            defaults=defaults,
            media=list(self._media.kinds),
            more_media=list(self._media.more_kinds),
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
        overviews = self._schedulers.overviews
        return Heartbeat(
            state,
            reason,
            len(self._requests),
            self._requests.num_deliveries,
            overview=overviews[0] if overviews else None,
            more_overviews=overviews[1:],
        )

    def _state(self) -> tuple[State, str]:
        if self._is_draining:
            return State.DRAINING, "finishing open requests"
        if self._link is None:
            return State.NOT_READY, "loading the tokenizer"
        if self._schedulers.are_ready:
            return State.READY, ""
        return State.NOT_READY, self._schedulers.unready_reason

    def _report_to(self, gateway: Peer) -> None:
        assert self._link is not None
        self._inquiries.ask(gateway, self._link.peers, time.monotonic())
        num_threads = self._config.tokenizer_threads
        stats: Stats = {"open_prompts": self.status().load, "threads": num_threads}
        gateway.send(make_report(self._link, stats))

    def refusal(self, hello: Hello) -> str | None:
        return None

    def on_up(self, peer: Peer) -> None:
        if peer.hello.service == "gateway":
            peer.send(Vocabulary(), *self._vocabulary)
        else:
            self._schedulers.add(peer)
            if peer.stood_still:
                self._send_survival(peer)
        for each in self._extensions:
            each.on_up(peer)

    def _send_survival(self, scheduler: Peer) -> None:
        """It lives after all: nothing that it had can have been the reason."""
        assert self._link is not None
        for peer in self._link.peers:
            if peer.hello.service == "gateway":
                peer.send(Lost([], is_explained=True, scheduler=scheduler.hello.instance))

    def on_down(self, peer: Peer, reason: str) -> None:
        if peer.hello.service == "scheduler":
            self._schedulers.remove(peer)
        if self._requests is not None:
            self._requests.lose(peer)
        for each in self._extensions:
            each.on_down(peer)

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
            case Lost(), "scheduler":
                requests.hand_over(peer, message)
            case Convert(), "gateway":
                requests.convert(peer, message, *arrays)
            case Abort(ids, owner), "gateway":
                requests.abort(ids, owner)
            case Inquire(), "gateway":
                self._report_to(peer)
            case ServiceReport(), service:
                if service == "gateway":
                    check_own(peer, message)
                self._inquiries.pass_on(message, time.monotonic())
            case _ if not is_taken(self._extensions, peer, message):
                log.warning("%s sent a %s, which is not for us", peer, type(message).__name__)


AUTO, NONE = "auto", "none"
OVERRIDE = "override-generation-config"


class _GenerationConfig(SamplingFields):
    """The keys that we read."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


def read_defaults(
    model: Path, setting: str, override: dict[str, Any]
) -> tuple[SamplingDefaults, int | None]:
    """The defaults for clients, and the default limit on tokens of a text (None: no limit).

    ``setting`` is ``auto`` for the model's own folder, ``none``, or another folder. Values of
    ``override`` come before the folder's.

    Raises ConfigError for a folder without the file, and for values that are invalid in a request.
    """
    path = (model if setting == AUTO else Path(setting)) / GENERATION_CONFIG_FILE
    configs = [_override(override)]
    if path.is_file() and setting != NONE:
        configs.insert(0, decode_json(path, _GenerationConfig))
    elif setting not in (AUTO, NONE):
        raise ConfigError(
            f"generation-config: {setting} is auto, none, or a folder with {GENERATION_CONFIG_FILE}"
        )
    sampling, max_tokens = SamplingDefaults(), None
    for config in configs:
        sampling, max_tokens = with_fields(sampling, config), config.max_new_tokens or max_tokens
    return sampling, max_tokens


def _override(values: dict[str, Any]) -> _GenerationConfig:
    """Raises ConfigError for a value that is wrong or has no effect."""
    names = _GenerationConfig.__struct_fields__
    for name in values.keys() - set(names):
        raise ConfigError(
            f"{OVERRIDE}: {name} is no default of sampling; there are {', '.join(names)}"
        )
    try:
        return msgspec.convert(values, _GenerationConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{OVERRIDE}: {error}") from None
