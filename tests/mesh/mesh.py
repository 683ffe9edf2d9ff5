"""The whole chain over real sockets in one event loop, with a fake engine at its end."""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import msgspec
from tokenizers import Tokenizer

from services.gateway.service import GatewayService
from services.scheduler.service import SchedulerService
from services.tokenizer.service import TokenizerService
from services.tokenizer.text_model import ChatSettings, TextModel
from services.worker.service import WorkerService
from shared.model_folder import EMBEDDED_MODEL, read_model_info
from shared.process.report import is_fit
from shared.process.service import Service
from shared.settings.gateway import GatewayConfig
from shared.settings.scheduler import SchedulerConfig
from shared.settings.tokenizer import TokenizerConfig
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Capacity
from tests.mesh.fake_engine import FakeEngine

READY_TIMEOUT_S = 20
DEFAULT_CAPACITY = Capacity(256, 16, 8, 64, 2048, max_num_steps=4)
TEXT = "The shoal turns as one, and no fish gives the order. "
TEXT_MODELS: dict[tuple[Path, int, int, str], TextModel] = {}


@dataclass
class Mesh:
    """Services by name; the second of a kind is ``worker-1`` and so on."""

    directory: Path
    services: dict[str, Any]  # tests look into them
    tasks: dict[str, asyncio.Task]
    engines: dict[str, FakeEngine]
    new_engine: Callable[[], FakeEngine]
    model: Path = EMBEDDED_MODEL

    def url(self, gateway: str = "gateway") -> str:
        return f"http://127.0.0.1:{self.services[gateway].port}"

    @property
    def engine(self) -> FakeEngine:
        return self.engines["worker"]

    @property
    def core(self):
        return self.services["scheduler"]._core

    @property
    def cores(self) -> list[Any]:
        return [each._core for name, each in self.services.items() if name.startswith("scheduler")]

    def start(self, name: str, service: Service | None = None) -> None:
        """A service of the kind in ``name``; a lost one returns."""
        self.services[name] = service or self._new(name.partition("-")[0], name)
        self.tasks[name] = asyncio.create_task(self.services[name].run())

    def _new(self, kind: str, name: str) -> Service:
        at: dict[str, Any] = {"mesh_dir": self.directory, "instance": secrets.token_hex(4)}
        match kind:
            case "gateway":
                return GatewayService(GatewayConfig(**at, port=0, max_logprobs=-1, ready_wait_s=0))
            case "tokenizer":
                max_len = self.new_engine().capacity.max_model_len
                config = TokenizerConfig(**at, model=str(self.model), max_model_len=max_len)
                return TokenizerService(config)
            case "scheduler":
                return SchedulerService(SchedulerConfig(**at, max_waiting=16))
            case _:
                engine = self.engines[name] = self.new_engine()
                return WorkerService(WorkerConfig(**at), lambda config, progress: engine)

    async def until(self, is_true: Callable[[], object]) -> None:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not is_true():
                await asyncio.sleep(0.02)

    async def until_ready(self) -> None:
        """Waits until every service has all its connections."""
        await self.until(lambda: all(is_fit(each) for each in self.services.values()))
        num_tokenizers = len([name for name in self.services if name.startswith("tokenizer")])
        gateways = [each for name, each in self.services.items() if name.startswith("gateway")]
        await self.until(
            lambda: all(len(each._mesh.tokenizers.ready()) == num_tokenizers for each in gateways)
        )

    async def until_idle(self) -> None:
        """Waits until nothing is open and every block is free. Times out otherwise."""
        await self.until(lambda: not any(each.status().load for each in self.services.values()))
        pools = [worker.pool for core in self.cores for worker in core.workers.values()]
        await self.until(lambda: all(pool.num_free == pool.num_blocks for pool in pools))

    async def lose(self, name: str, says_bye: bool = True) -> None:
        """Ends a service without draining; unless it ``says_bye`` its connections just end."""
        service = self.services.pop(name)
        service._is_draining = says_bye
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks.pop(name), return_exceptions=True)
        del service


@asynccontextmanager
async def running_mesh(
    directory: Path,
    capacity: Capacity = DEFAULT_CAPACITY,
    step_s: float = 0.002,
    num_gateways: int = 1,
    num_tokenizers: int = 1,
    num_workers: int = 1,
    num_schedulers: int = 1,
    model: Path = EMBEDDED_MODEL,
):
    ids = list(ids_of_text(model))
    info = read_model_info(model, [], capacity.max_model_len)
    capacity = msgspec.structs.replace(capacity, vocab_size=info.vocab_size)
    mesh = Mesh(directory, {}, {}, {}, lambda: FakeEngine(info, capacity, ids, step_s), model)
    counts = {
        "scheduler": num_schedulers,
        "tokenizer": num_tokenizers,
        "worker": num_workers,
        "gateway": num_gateways,
    }
    for kind, num in counts.items():
        for index in range(num):
            mesh.start(f"{kind}-{index}" if index else kind)
    with patch("services.tokenizer.service.TextModel", loaded_once):
        try:
            await mesh.until_ready()
            yield mesh
        finally:
            for task in mesh.tasks.values():
                task.cancel()
            await asyncio.gather(*mesh.tasks.values(), return_exceptions=True)


@cache
def ids_of_text(model: Path) -> tuple[int, ...]:
    return tuple(Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT).ids)


def loaded_once(folder: Path, max_len: int, vocab_size: int, settings: ChatSettings) -> TextModel:
    """Half of a mesh's start is the load of its text model, which never changes."""
    key = folder, max_len, vocab_size, repr(settings)
    if key not in TEXT_MODELS:
        TEXT_MODELS[key] = TextModel(folder, max_len, vocab_size, settings)
    return TEXT_MODELS[key]


async def ask(mesh: Mesh, gateway: str = "gateway") -> dict[str, list[dict]]:
    """The services of each role, as ``/v1/mesh`` lists them."""
    async with (
        aiohttp.ClientSession(mesh.url(gateway)) as http,
        http.get("/v1/mesh") as response,
    ):
        assert response.status == 200
        reply = await response.json()
    assert reply["object"] == "mesh"
    roles: dict[str, list[dict]] = {"gateway": [], "tokenizer": [], "scheduler": [], "worker": []}
    for service in reply["services"]:
        roles[service["role"]].append(service)
    return roles
