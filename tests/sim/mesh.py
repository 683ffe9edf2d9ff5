"""A mesh of real services on a virtual loop."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Literal
from unittest.mock import Mock, patch

import msgspec
from msgspec.structs import replace

from services.gateway.service import GatewayService
from services.scheduler.media.cell import CellMedia
from services.scheduler.service import SchedulerService
from services.tokenizer.service import TokenizerService
from services.worker.media.extension import WorkerMedia
from shared.model_folder import EMBEDDED_MODEL, read_model_info
from shared.process.service import Service
from shared.settings.base import Settings
from shared.settings.gateway import GatewayConfig
from shared.settings.scheduler import SchedulerConfig
from shared.settings.tokenizer import TokenizerConfig
from shared.settings.worker import WorkerConfig
from shared.wire.messages import (
    EVERY_LAYER,
    Capacity,
    Group,
    Message,
    ModelInfo,
    ServiceName,
)
from tests.sim.adapters import EVERY, KEPT, order
from tests.sim.clients import Request, ask
from tests.sim.engine import SimulatedEngine
from tests.sim.images import CHAT_TEMPLATE, FAMILY, MOST_TOKENS, SimulatedEncoders, reading
from tests.sim.moves import Exchange, MoveShape, MovingService, moving_in
from tests.sim.network import Machine, Network, Sockets
from tests.sim.stores import Folders, held_by, least_minor
from tests.sim.virtual_loop import THREAD_S, TURN_S, VirtualLoop

Kind = ServiceName | Literal["encoder"]
ORDER: tuple[ServiceName, ...] = ("gateway", "tokenizer", "scheduler", "worker")
KINDS: tuple[Kind, ...] = (*ORDER, "encoder")
"""An encoder is a worker, which the mesh can do without."""
DRAIN_S = 4.0
STALL_S = 3.0
SETTLED_S = 2.0
LOOK_S = 0.05
LOWER = ("tcp://schedulers",)
ENCODERS = ("tcp://encoders",)
NOWHERE = Path("/nonexistent/shoal")
LONG_TOKENS = 30  # for prefill workers
FETCHED_TOKENS = 16  # of a prefix of another worker


class Host(Machine):
    """A process of the mesh, from its start to its end. ``may_break``: a fault breaks it."""

    def __init__(self, site: "Site", address: str, pace_s: float) -> None:
        super().__init__(site.name, address, site.minor)
        self.pace_s = self.thread_s = pace_s
        self.site = site
        self.kind = site.kind
        self.service: Any = None
        self.engine: SimulatedEngine | None = None
        self.is_stopping = False
        self.begun_s = 0.0
        self.waits_since_s = inf  # of a scheduler: with a worker that could compute
        self.may_break = False
        self._stop = asyncio.Event()

    def stop_soon(self) -> None:
        self._stop.set()

    def held(self) -> dict[str, int]:
        """What it has of requests."""
        service = self.service
        if service is None:
            return {}
        match self.kind:
            case "gateway":
                tokenizers = list(service._mesh.tokenizers)
                return {
                    "prompts": sum(len(each.prompts) for each in tokenizers),
                    "lost prompts": len(list(service._mesh._lost)),
                    "bytes": service._admission._num_bytes,
                    "requests": service._admission.num_open,
                }
            case "tokenizer":
                if (requests := service._requests) is None:
                    return {}
                lanes = service._lanes._short, service._lanes._long
                return {
                    "requests": len(requests),
                    "grants": len(requests._credits._grants),
                    "sequences": sum(each.num for each in service._schedulers._ours.values()),
                    "threads": sum(lane._slots._held.total() for lane in lanes),
                    "bytes of pixels": service._media._memory.num_bytes,
                }
            case "scheduler":
                core = service._core
                pools = [each.pool for each in core.workers.values()]
                return {
                    "sequences": len(core.sequences),
                    "waiting": len(list(core.queues)),
                    "running": sum(len(each.running) for each in core.workers.values()),
                    "plans": sum(len(each.in_flight) for each in core.workers.values()),
                    "blocks": sum(each.num_blocks - each.num_free for each in pools),
                    "tokens": sum(len(each._held) for each in service._routes.values()),
                    "copies": held_by(service),
                    **moving_in(service),
                    "bytes of pixels": sum(
                        each._num_bytes
                        for each in service._extensions
                        if isinstance(each, CellMedia)
                    ),
                }
            case "worker":
                assert self.engine is not None
                of_images = self.engine.media.held()
                return {
                    "steps": service._num_pending,
                    "sequences": service._load,
                    "blocks of others": len(service.inbox),
                    **of_images,
                }
            case "encoder":
                return {**service.held(), "items": len(service._jobs)}


class Site:
    """One service of the mesh: a process of it runs, or will again."""

    def __init__(self, kind: Kind, number: int, settings: dict[str, Any]) -> None:
        self.kind = kind
        self.name = f"{kind[0]}{number}"
        self.settings = settings
        self.minor: int | None = None
        self.host: Host | None = None


class Mesh:
    """``sites`` by kind. ``broken`` are the errors that ended services by themselves."""

    def __init__(self, seed: int, shape: "Shape", is_logged: bool = False) -> None:
        self.random = Random(seed)
        self.loop = VirtualLoop(self.random)  # type: ignore[abstract]
        self.network = Network(self.loop, is_logged)
        self.shape = shape
        has_states = shape.capacity.num_states is not None
        self.folders = Folders(shape.num_locations, shape.num_places, has_states, shape.num_on_disk)
        self.exchange = Exchange(self.loop, self._worker)
        self.sites = [
            Site(kind, number, shape.settings[kind])
            for kind in KINDS
            for number in range(shape.num[kind])
        ]
        self.hosts: list[Host] = []  # all that ever ran
        self.broken: list[str] = []
        self.gaps: list[float] = []  # looks at which it could serve nobody
        self.requests: list[Request] = []
        self._numbers = count(1)
        self._is_over = False
        self.on_look: Callable[[], None] = lambda: None
        self.loop.look_up = self._look_up

    @contextmanager
    def running(self) -> Iterator[None]:
        with (
            self.loop.entered(),
            patch.object(logging.Logger, "isEnabledFor", lambda *_: False),
            patch("shared.link.link.SocketContext", lambda keys: Sockets(self.network)),
            patch("services.gateway.service.REGISTRY", Mock()),
            patch("services.scheduler.service.FORWARD_INTERVAL_S", self.shape.forward_interval_s),
            patch("services.scheduler.adapters.cell.FORGET_S", self.shape.forget_s),
            patch("services.scheduler.moves.roles.LONG_TOKENS", LONG_TOKENS),
            patch("services.scheduler.moves.fetches.MIN_TOKENS", FETCHED_TOKENS),
            patch("services.worker.service.EXTENSIONS", [WorkerMedia]),
            patch.object(TokenizerService, "_load", _load),
        ):
            try:
                yield
            finally:
                self._bury()

    def run(self, within_s: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Whether it came true in time, as far as a look now and then shows."""
        end_s = self.loop.now_s + within_s
        while not until() and self.loop.now_s < end_s:
            self.loop.run_until(self.loop.now_s + LOOK_S)
            self._look()
        return until()

    def later(self, delay_s: float, callback: Callable[..., None], *arguments: Any) -> None:
        self.loop.call_later(delay_s, callback, *arguments, context=self.loop.world.context)

    def _works(self, host: Host) -> bool:
        """Whether it has had the time to find the others, and does not stand still or hurry."""
        is_settled = self.loop.now_s - host.begun_s >= SETTLED_S
        is_quick = (host.turn_s, host.thread_s) == (TURN_S, host.pace_s)
        return is_settled and is_quick and host.free_s <= self.loop.now_s and not host.is_stopping

    def live(self, *kinds: Kind) -> list[Host]:
        hosts = (site.host for site in self.sites)
        return [each for each in hosts if each is not None and each.kind in (kinds or KINDS)]

    def _worker(self, name: str) -> MovingService | None:
        found = [host.service for host in self.live("worker") if host.name == name]
        return found[0] if found else None

    def _look_up(self, name: str) -> list[str]:
        """As of a name server: it lists the addresses of a service that run."""
        return [each.address for each in self.live() if f"{each.kind}s" == name]

    # --- processes ------------------------------------------------------------------------------

    def start(self, site: Site) -> None:
        if site.host is not None or self._is_over:
            return
        number = next(self._numbers)
        address = f"10.0.{number // 250}.{1 + number % 250}"
        pace_s = self.shape.step_s if site.kind == "worker" else THREAD_S
        host = site.host = Host(site, address, pace_s)
        host.clock_s = self.random.uniform(0, 1e5)
        host.begun_s = self.loop.now_s
        self.hosts.append(host)
        self.network.note(f"{site.name} starts")
        self._in(host, self._serve(host))

    def _in(self, host: Host, coroutine: Any) -> None:
        context = host.context.copy()
        context.run(lambda: self.loop.create_task(coroutine, context=context))

    async def _serve(self, host: Host) -> None:
        """As ``shared.process.service`` does."""
        try:
            host.service = self._build(host)
            running = asyncio.ensure_future(host.service.run())
            stop = asyncio.ensure_future(host._stop.wait())
            await asyncio.wait([running, stop], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                try:
                    async with asyncio.timeout(DRAIN_S):
                        await host.service.drain()
                except TimeoutError:
                    pass
                running.cancel()
                await asyncio.wait([running])
            stop.cancel()
            if not running.cancelled() and (error := running.exception()) is not None:
                host.errors.append(error)
        except Exception as error:
            host.errors.append(error)
        self.later(0, self.end, host, "has ended")

    def _build(self, host: Host) -> Service:
        settings = host.site.settings
        if host.kind in ("tokenizer", "scheduler"):
            settings = {**settings, "listen_address": f"tcp://{host.address}"}
        if host.kind == "encoder":
            settings = {**settings, "kv_transfer_address": f"tcp://{host.address}"}
        config = _config(host.kind, host.name, **settings)
        match host.kind:
            case "gateway":
                return GatewayService(config)
            case "tokenizer":
                return TokenizerService(config)
            case "scheduler":
                return SchedulerService(config)
            case "encoder":
                return SimulatedEncoders(config)
            case "worker":
                number = int(host.name[1:])
                location, own, stores = self.folders.open(number, host)
                engine = host.engine = SimulatedEngine(
                    model(),
                    self.shape.capacity,
                    own=own,
                    stores=stores,
                    num_pieces=self.shape.moves.num_pieces,
                    disk=self.folders.open_disk(host),
                    disks=self.folders.disks,
                )
                engine.step_s *= 1 + 2 * (number % 2)
                service = MovingService(
                    config,
                    lambda config, progress: engine,
                    self.shape.adapters,
                    lambda: [slot.admit.options for slot in engine.worker.slots.values()],
                    location=location,
                    engine=lambda: engine,
                    speaks=host.minor is None
                    or host.minor >= least_minor(own, self.shape.capacity),
                    folders=self.folders,
                    speaks_of_disks=host.minor is None,
                    process=host,
                    exchange=self.exchange,
                    shape=self.shape.moves,
                    knows_moves=host.minor is None,
                )
                engine.adapters = service.adapters
                return service

    def end(self, host: Host, why: str, is_silent: bool = False, drops: bool = False) -> None:
        """The process is no more; another one takes its place in a while."""
        if host.is_dead:
            return
        self.network.note(f"{host.name} {why}")
        host.is_dead = True
        self._note_errors(host)
        self.network.end_all_of(host, is_silent, drops)
        host.site.host = None
        self.later(self.random.uniform(0.05, 2), self.start, host.site)

    def _note_errors(self, host: Host) -> None:
        if host.errors and not host.may_break:
            self.broken.append(f"{host.name}: {host.errors[0]!r}")

    def _look(self) -> None:
        """Ends the processes that a callback broke, and notes when the mesh cannot serve."""
        for host in self.live():
            if host.errors:
                self.end(host, f"breaks: {host.errors[0]!r}")
        if {host.kind for host in self.live(*ORDER) if self._works(host)} != set(ORDER):
            self.gaps.append(self.loop.now_s)
        self.on_look()

    def ask(self, gateway: Host, request: Request) -> None:
        self.network.note(f"{gateway.name} is asked for {request.name}, job {request.job_number}")
        self.requests.append(request)
        request.gateway = gateway
        self._in(gateway, self._ask(gateway, request))

    def order(self, gateway: Host, message: Message) -> None:
        self.network.note(f"{gateway.name} orders {message}")
        self._in(gateway, order(gateway.service, message))

    async def _ask(self, gateway: Host, request: Request) -> None:
        with gateway.service._admission.admit():
            await ask(gateway.service._mesh, request)
        request.ended_s = self.loop.now_s
        self.network.note(f"{request.name} ends: {request.error or 'well'}")

    def _bury(self) -> None:
        """Lets all that is left end, unheard: no coroutine is left to the garbage collector."""
        self._is_over = True
        for host in self.hosts:
            self.network.end_all_of(host, is_silent=True, drops=True)
            host.is_dead, host.free_s, host.turn_s, host.trap = False, 0.0, 0.0, None
            self.loop.give_turn(host)
        tasks = [task for host in self.hosts for task in host.tasks]
        for task in tasks:
            task.cancel()
        while not all(task.done() for task in tasks):
            self.loop.run_until(self.loop.now_s + LOOK_S)


class Shape:
    """How many of each service there are, with which settings."""

    def __init__(self, random: Random | None) -> None:
        """The smallest without ``random``."""

        def draw(*choices: Any) -> Any:
            return choices[0] if random is None else random.choice(choices)

        self.num: dict[Kind, int] = {
            "gateway": draw(1, 1, 2),
            "tokenizer": draw(1, 2, 3),
            "scheduler": draw(1, 2),
            "worker": draw(1, 2, 3),
            "encoder": 0,
        }
        self.step_s = draw(1, 3, 10, 10) * THREAD_S
        self.capacity = Capacity(
            num_blocks=draw(128, 26, 40),
            block_size=16,
            max_num_seqs=draw(4, 1, 2, 8),
            max_num_batched_tokens=draw(64, 8, 32),
            max_model_len=model().max_model_len,
            vocab_size=model().vocab_size,
            num_speculative_tokens=draw(0, 0, 1, 3),
            adapts_depth=draw(False, True),
            max_num_steps=draw(1, 1, 4),
            stall_s=STALL_S,
            media=FAMILY.kinds,
        )
        groups = draw(EVERY_LAYER, EVERY_LAYER, (Group(), Group(24)), (Group(16),))
        num_blocks = self.capacity.num_blocks * len(groups)
        num_states = draw(None, 0, 2, 9) if groups == EVERY_LAYER else None
        self.capacity = replace(
            self.capacity, num_blocks=num_blocks, groups=groups, num_states=num_states
        )
        self.is_small = draw(False, False, False, True)  # so that queues may be full
        self.forward_interval_s = draw(0.01, 0.1)
        self.settings: dict[str, dict[str, Any]] = {
            "gateway": {"tokenizer_address": ("tcp://tokenizers",), "port": 0},
            "tokenizer": {
                "scheduler_address": LOWER,
                "max_open_requests": 4 if self.is_small else 64,
            },
            "scheduler": {
                "max_waiting": 6 if self.is_small else 256,
                "pipeline_depth": draw(2, 1),
                "enable_prefix_caching": draw(True, True, False),
                "later_priority_share": draw(0.2, 0.05, 0.8),
                "worker_grace_s": draw(20.0, 60.0),
                "max_media_bytes": 300 if self.is_small else 1 << 20,
            },
            "worker": {
                "scheduler_address": LOWER,
                "encoder_address": ENCODERS,
                "stall_s": STALL_S,
            },
            "encoder": {"worker_role": "encoder", "stall_s": STALL_S},
        }
        self.settings["scheduler"]["min_stream_rate"] = draw(0.5, 0.5, 0, 0.8)
        self.capacity = replace(self.capacity, max_adapters=draw(2, 2, 1))
        self.adapters = draw(EVERY, EVERY, KEPT, KEPT, KEPT)  # of a worker at its start
        self.forget_s = draw(60.0, 0.2, 2.0)
        self.num_locations = draw(0, 0, 0, 1, 1, 2)  # of stores
        self.num_places = draw(400, 5, 40)
        self.moves = MoveShape.drawn(draw)
        if draw(False, False, True):  # so that sequences move
            self.num |= {"scheduler": draw(1, 2), "worker": 3}
            self.step_s = 10 * THREAD_S
            groups = draw(EVERY_LAYER, EVERY_LAYER, (Group(), Group(24)), (Group(16),))
            num_states = draw(None, 9) if groups == EVERY_LAYER else None
            self.capacity = replace(
                self.capacity,
                num_blocks=128 * len(groups),
                groups=groups,
                num_states=num_states,
            )
        self.num_on_disk = 0
        if random is not None:
            apart = Random(f"disks {random.getstate()}")
            self.num_on_disk = apart.choice([0, 3, 100, 100])
            if self.num_on_disk and apart.random() < 0.7:
                self.num_places = apart.choice([3, 6, 12])
        if random is not None:
            self.num["encoder"] = Random(f"encoders {random.getstate()}").choice([0, 1, 1, 2])
        if random is not None and self._computes_items_whole(random):
            self.capacity = replace(self.capacity, media=(), whole_media=FAMILY.kinds)

    def _computes_items_whole(self, random: Random) -> bool:
        """If a step may have them. Drawn apart, so that the other draws of a seed stay."""
        apart = Random(str(random.getstate()))
        return self.capacity.max_num_batched_tokens > MOST_TOKENS and apart.random() < 0.4


CONFIGS: dict[Kind, type[Settings]] = {
    "gateway": GatewayConfig,
    "tokenizer": TokenizerConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
    "encoder": WorkerConfig,
}


@cache
def _config(kind: Kind, name: str, **settings: Any) -> Any:
    assert settings.keys() <= CONFIGS[kind].model_fields.keys()
    return CONFIGS[kind](
        mesh_dir=NOWHERE,
        instance=name,
        insecure_tcp=True,
        drain_timeout_s=DRAIN_S,
        **settings,
    )


@cache
def model() -> ModelInfo:
    return read_model_info(EMBEDDED_MODEL, [], None)


@cache
def _loaded() -> TokenizerService:
    config = TokenizerConfig(mesh_dir=NOWHERE, instance="t", chat_template=CHAT_TEMPLATE)
    service = TokenizerService(config)
    service.info = _REAL_LOAD(service)  # type: ignore[attr-defined]
    return service


_REAL_LOAD = TokenizerService._load


def _load(self: TokenizerService) -> ModelInfo:
    """The text model is loaded once, for all tokenizers of all meshes."""
    loaded = _loaded()
    self._text, self._max_tokens = loaded._text, loaded._max_tokens
    self._media = reading(self._text.max_model_len)
    self._vocabulary = loaded._vocabulary
    info: ModelInfo = loaded.info  # type: ignore[attr-defined]
    return msgspec.structs.replace(info)
