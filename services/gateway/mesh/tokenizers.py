"""The tokenizers a gateway is connected to, and the choice of one for a request."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.mesh.losses import Backoff
from services.gateway.mesh.open_prompt import OpenPrompt
from shared.errors import (
    RETRY_AFTER_S,
    InternalError,
    RequestError,
    Unavailable,
)
from shared.link.extension import Objection, able
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.envelope import RequestOptions
from shared.wire.messages import Hello, ModelInfo, Overview, RequestKey
from shared.wire.same_model import difference

log = logging.getLogger(__name__)
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
NO_OPTIONS = RequestOptions()


class Probation:
    """A tokenizer is on probation until it accepts or converts something, and again after a
    failure. While other tokenizers are not on probation, it gets one request at a time, and after a
    failure none until a pause is over: a tokenizer that fails everything would always have the
    fewest open requests. Times are monotonic. Pure."""

    def __init__(self) -> None:
        self.is_over = False
        self._begin()

    def _begin(self) -> None:
        self._backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)

    def succeed(self) -> None:
        self.is_over = True

    def fail(self, now_s: float) -> None:
        if self.is_over:
            self.is_over = False
            self._begin()
        self._backoff.wait(now_s)

    def admits(self, num_open: int, now_s: float) -> bool:
        """Whether it may have a request that other tokenizers could serve."""
        return self.is_over or (num_open == 0 and now_s >= self._backoff.retry_at_s)


@dataclass(slots=True, eq=False)
class Tokenizer:
    """A connected tokenizer, and our prompts and conversions that it works on."""

    peer: Peer
    prompts: dict[RequestKey, OpenPrompt] = field(default_factory=dict)
    conversions: dict[str, asyncio.Future[Array]] = field(default_factory=dict)
    probation: Probation = field(default_factory=Probation)

    @property
    def num_open(self) -> int:
        return len(self.prompts) + len(self.conversions)

    @property
    def model(self) -> ModelInfo:
        """Its model; ``Tokenizers.refusal`` rejects a tokenizer without one."""
        assert self.peer.hello.model is not None
        return self.peer.hello.model

    def note_failure(self, error: RequestError) -> None:
        """Puts the tokenizer on probation after it failed a prompt that another one accepted: it
        may be broken."""
        if self.probation.is_over:
            log.warning("%s failed a request (%s): it is on probation", self.peer, error.code)
        self.probation.fail(time.monotonic())


class Tokenizers:
    """Keeps the connected tokenizers and wakes waiting requests. No tokenizer is polled.

    ``ready_model`` and ``known_model`` wait up to ``ready_wait_s``; ``on_change`` is called when a
    tokenizer comes, goes or has another state. A request goes to none with one of the
    ``objections``.
    """

    def __init__(self, ready_wait_s: float, on_change: Callable[[], None]) -> None:
        self.objections: list[Objection] = []
        self._ready_wait_s = ready_wait_s
        self._on_change = on_change
        self._by_peer: dict[Peer, Tokenizer] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_peer)

    def __iter__(self) -> Iterator[Tokenizer]:
        return iter(self._by_peer.values())

    def __getitem__(self, peer: Peer) -> Tokenizer:
        return self._by_peer[peer]

    def get(self, peer: Peer) -> Tokenizer | None:
        return self._by_peer.get(peer)

    def add(self, peer: Peer) -> None:
        self._by_peer[peer] = Tokenizer(peer)
        peer.on_state = self._note_change
        self._note_change()

    def remove(self, peer: Peer) -> Tokenizer:
        tokenizer = self._by_peer.pop(peer)
        self._note_change()
        return tokenizer

    def refusal(self, hello: Hello) -> str | None:
        """Returns why the tokenizer that sent ``hello`` may not connect, or None."""
        if hello.model is None or not hello.model.names:
            return "a tokenizer must send its model and a name for it"
        return next(filter(None, (difference(hello, peer.hello) for peer in self._by_peer)), None)

    @property
    def model(self) -> ModelInfo:
        """The served model. Raises Unavailable while no tokenizer is connected."""
        for tokenizer in self:
            return tokenizer.model
        raise self.unavailable()

    async def known_model(self) -> ModelInfo:
        """Returns ``model`` once a tokenizer is connected. Raises Unavailable."""
        await self._wait_until(lambda: bool(self._by_peer))
        return self.model

    async def ready_model(self) -> ModelInfo:
        """Returns ``model`` once requests can be served. Raises Unavailable. The wait covers a
        service that has just died or is starting: it is ready in a moment."""
        await self._wait_until(lambda: bool(self.ready()))
        return self.model

    def ready(self) -> list[Tokenizer]:
        return [tokenizer for tokenizer in self if tokenizer.peer.is_ready]

    def least_loaded(self, options: RequestOptions = NO_OPTIONS, minor: int = 0) -> Tokenizer:
        """Returns the ready tokenizer with the fewest open requests, first ours, then of all
        gateways; one on probation only if there is no other. Its protocol is ``minor`` or later.
        Raises Unavailable, also if the protocol of all is older, and the error of an objection
        against all."""
        ready = self._able(self.ready(), options, minor)
        if not ready:
            raise self.unavailable()
        return _least_loaded(ready)

    def other_for(
        self,
        failed: Tokenizer,
        error: RequestError,
        options: RequestOptions = NO_OPTIONS,
        minor: int = 0,
    ) -> Tokenizer | None:
        """Returns a tokenizer to find the cause of an ``error``: the request, or the tokenizer that
        ``failed``. None if the error shows the cause, or without another tokenizer."""
        if error.status != InternalError.status:
            return None
        try:
            others = [each for each in self.ready() if each is not failed]
            others = self._able(others, options, minor)
        except RequestError:
            return None
        return _least_loaded(others) if others else None

    def _able(
        self, tokenizers: list[Tokenizer], options: RequestOptions, minor: int
    ) -> list[Tokenizer]:
        """Raises Unavailable while the protocol of all is older, as in an upgrade, and the error of
        an objection against all."""
        peers = [each.peer for each in tokenizers if each.peer.hello.minor >= minor]
        if tokenizers and not peers:
            text = f"a tokenizer of protocol minor {minor} is needed, and none is there"
            raise Unavailable(text, retry_after_s=RETRY_AFTER_S)
        peers = able(peers, options, self.objections)
        return [self[peer] for peer in peers]

    @property
    def unready_reason(self) -> str | None:
        """Why no request can be served now, or None."""
        if not self._by_peer:
            return "no tokenizer is connected"
        if self.ready():
            return None
        return "; ".join(f"{peer}: {peer.status.reason}" for peer in self._by_peer)

    def unavailable(self) -> Unavailable:
        return Unavailable(self.unready_reason or "no model is known", retry_after_s=RETRY_AFTER_S)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._ready_wait_s):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            raise self.unavailable() from None

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()


def _least_loaded(ready: list[Tokenizer]) -> Tokenizer:
    now_s = time.monotonic()
    good = [each for each in ready if each.probation.admits(each.num_open, now_s)]
    return min(good or ready, key=lambda each: (each.num_open, each.peer.status.load))


class MeshMetrics(Collector):
    """Reads figures of the whole mesh, the same on every gateway, from the last heartbeats whenever
    the metrics are scraped. They are up to two seconds old.

    Without a scheduler, the figures that only schedulers know are absent: a 0 would mean that the
    mesh idles.
    """

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers

    def describe(self) -> list[Metric]:
        """Claims no names: a scheduler has some of them too, and tests run both in one process."""
        return []

    def collect(self) -> Iterator[Metric]:
        reported = chain.from_iterable(each.peer.status.overviews for each in self._tokenizers)
        overviews = list({each.scheduler: each for each in reported}.values())
        yield _replicas(len(self._tokenizers), overviews)
        if overviews:
            yield from _load(self._tokenizers.model.names[0], overviews)


def _replicas(num_tokenizers: int, overviews: list[Overview]) -> Metric:
    text = "Connected services, ready or not; tokenizers: to this gateway"
    family = GaugeMetricFamily("shoal_mesh_replicas", text, labels=["service"])
    family.add_metric(["tokenizer"], num_tokenizers)
    family.add_metric(["scheduler"], len(overviews))
    family.add_metric(["worker"], sum(each.num_workers for each in overviews))
    return family


def _load(model: str, overviews: list[Overview]) -> Iterator[Metric]:
    num_blocks = sum(each.num_blocks for each in overviews)
    num_free = sum(each.num_free_blocks for each in overviews)
    figures = {
        "vllm:num_requests_running": (
            "Sequences that have a slot in a worker",
            sum(each.num_running for each in overviews),
        ),
        "vllm:num_requests_waiting": (
            "Sequences that wait for a slot",
            sum(each.num_waiting for each in overviews),
        ),
        "vllm:kv_cache_usage_perc": (
            "Share of all KV blocks in use, 0 to 1",
            1 - num_free / num_blocks if num_blocks else 0.0,
        ),
    }
    for name, (text, value) in figures.items():
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([model], value)
        yield family
