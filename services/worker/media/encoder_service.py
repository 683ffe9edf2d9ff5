"""A worker of the role ``encoder``: it has the tower of a model alone, and encodes for others."""

import asyncio
import logging
import time
import zlib
from functools import partial
from itertools import count
from typing import NamedTuple

from torch import Tensor

from services.worker.machine.hardware import choose_device, choose_dtype, compute_exactly
from services.worker.media.encoder import Encoder, Job
from services.worker.media.form import FeatureForm
from services.worker.media.item_check import num_tokens_of
from services.worker.media.other_encoders import AHEAD, ROLE, SERVICE, hello_of, why_unlike
from services.worker.media.tower_plan import TowerPlan
from services.worker.step_thread import call_soon, raise_soon
from shared.errors import CodecError, ConfigError
from shared.link.keys import load_keys
from shared.link.link import Link
from shared.link.peer import Peer
from shared.media.families import read_family
from shared.media.family import Family
from shared.model_folder import read_model_info
from shared.model_location import locate_model
from shared.pooling import read_pooling
from shared.process.cores import bind_to_node
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import Encode, Features, Heartbeat, Hello, Item, Message, State

log = logging.getLogger(__name__)

LOOK_S = 1.0


class Loaded(NamedTuple):
    encoder: Encoder
    family: Family
    form: FeatureForm


class EncoderService:
    """Workers dial it, schedulers do not know it. Raises ConfigError for a model without images."""

    def __init__(self, config: WorkerConfig) -> None:
        problem = _problem_of(config)
        if problem:
            raise ConfigError(f"worker-role: encoder: {problem}")
        self._config = config
        self._loaded: Loaded | None = None
        self._link: Link | None = None
        self._jobs: dict[str, tuple[Peer, Job]] = {}
        self._names = map(str, count())
        self._num_encoded = 0
        self._last_progress_s = time.monotonic()
        self._is_draining = False
        self._idle = asyncio.Event()

    async def run(self) -> None:
        """Raises ConfigError."""
        config = self._config
        if config.numa_node is not None and (why := bind_to_node(config.numa_node)):
            log.warning("numa-node: memory cannot be bound to the node (%s)", why)
        keys, loop = load_keys(config.keys, SERVICE), asyncio.get_running_loop()
        self._loaded = await loop.run_in_executor(None, self._load)
        encoder = self._loaded.encoder
        encoder.on_encoded = partial(call_soon, loop, self._send)
        encoder.on_error = partial(raise_soon, loop)
        link = self._link = Link(hello_of(config, self._loaded.form), self, keys)
        try:
            link.listen(config.mesh_dir, SERVICE, ROLE, tcp=config.kv_transfer_address)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                await link.run()
        finally:
            encoder.close()
            await link.close("the encoder leaves", is_planned=self._is_draining)

    def _load(self) -> Loaded:
        config = self._config
        location = locate_model(config.model)
        family = read_family(location.folder)
        if family is None:
            raise ConfigError(f"worker-role: encoder: {location.folder} is a model of texts alone")
        if read_pooling(location.folder, config.runner, config.pooler_config) is not None:
            raise ConfigError(f"worker-role: encoder: {location.folder} pools texts alone")
        device = choose_device(config.device, config.gpu_claims)
        compute_exactly()
        dtype = choose_dtype(config.dtype, device)
        max_len = read_model_info(location.folder, [], config.max_model_len).max_model_len
        plan = TowerPlan(config, location.folder, family, dtype, device, max_len=max_len)
        log.info("model %s: its tower alone on %s", location.name, device)
        for what, num_bytes in plan.num_bytes().items():
            log.info("%s: %.0f MiB", what, num_bytes / 2**20)
        return Loaded(plan.make_encoder(), family, plan.form)

    async def _watch(self) -> None:
        """A hanging thread cannot be stopped, so the process ends and is restarted."""
        while True:
            await asyncio.sleep(LOOK_S)
            waited_s = time.monotonic() - self._last_progress_s
            if self._jobs and waited_s > 2 * self._config.stall_s:
                raise RuntimeError(f"no image was encoded for {waited_s:.0f} s")

    async def drain(self) -> None:
        """Encodes the items that it has."""
        self._is_draining = True
        if self._link is not None and self._jobs:
            self._link.send_status()
            await self._idle.wait()

    def status(self) -> Heartbeat:
        numbers = len(self._jobs), self._num_encoded
        if self._is_draining:
            return Heartbeat(State.DRAINING, "finishing open requests", *numbers)
        if self._link is None:
            return Heartbeat(State.NOT_READY, "loading the tower", *numbers)
        return Heartbeat(State.READY, "", *numbers)

    def refusal(self, hello: Hello) -> str | None:
        assert self._loaded is not None
        return why_unlike(hello, self._loaded.form)

    def on_up(self, peer: Peer) -> None:
        """It sends items once it has some."""

    def on_down(self, peer: Peer, reason: str) -> None:
        for name in [name for name, (owner, _) in self._jobs.items() if owner is peer]:
            self._end(name)

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        """Raises CodecError."""
        if not isinstance(message, Encode):
            log.warning("%s sent a %s, which is not for us", peer, type(message).__name__)
            return
        item, (pixels,) = message.item, arrays
        self._check(peer, item, pixels)
        if not self._jobs:
            self._last_progress_s = time.monotonic()
        assert self._loaded is not None
        name, end = next(self._names), item.end
        job = Job(name, 1, end, [item], {item.digest: pixels})
        self._jobs[name] = peer, job
        self._loaded.encoder.add(job)

    def _check(self, peer: Peer, item: Item, pixels: Array) -> None:
        assert self._loaded is not None
        num = num_tokens_of(item, self._loaded.family)
        if (item.num_tokens, len(pixels)) != (num, item.num_bytes):
            raise CodecError(
                f"an item of {item.num_tokens} tokens with {len(pixels)} bytes of pixels; of the"
                f" size {item.size} it has {num} and {item.num_bytes}"
            )
        if sum(owner is peer for owner, _ in self._jobs.values()) == AHEAD:
            raise CodecError(f"more than {AHEAD} items at once")

    def _send(self, name: str, *_: int) -> None:
        """Packs the features on another thread: some have megabytes."""
        if name not in self._jobs:
            return
        assert self._loaded is not None
        job = self._jobs[name][1]
        features = self._loaded.encoder.features(job, job.items[0])
        loop = asyncio.get_running_loop()
        packed = loop.run_in_executor(None, _packed, self._loaded.form, features)
        packed.add_done_callback(partial(self._answer, name))

    def _answer(self, name: str, packed: "asyncio.Future[tuple[int, Array]]") -> None:
        """Its worker may be lost meanwhile."""
        if packed.cancelled() or name not in self._jobs:
            return
        (peer, job), (checksum, content) = self._jobs[name], packed.result()
        peer.send(Features(job.items[0].digest, checksum), content)
        self._num_encoded += 1
        self._last_progress_s = time.monotonic()
        self._end(name)

    def _end(self, name: str) -> None:
        assert self._loaded is not None
        _, job = self._jobs.pop(name)
        self._loaded.encoder.drop(job)
        if self._is_draining and not self._jobs:
            self._idle.set()


def _packed(form: FeatureForm, features: Tensor) -> tuple[int, Array]:
    """With their checksum."""
    content = form.pack(features)
    return zlib.crc32(content.data), content


def _problem_of(config: WorkerConfig) -> str:
    if config.language_model_only:
        return "language-model-only leaves nothing to encode"
    return f"{config.ranks_setting} {config.num_ranks}: 1 is the limit" * (config.num_ranks > 1)
