"""The whole chain over real sockets in one event loop, with a fake engine at its end."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from services.gateway.service import GatewayService
from services.scheduler.service import SchedulerService
from services.tokenizer.service import TokenizerService
from services.worker.service import WorkerService
from shared.config import (
    EMBEDDED_MODEL,
    GatewayConfig,
    SchedulerConfig,
    TokenizerConfig,
    WorkerConfig,
)
from shared.messages import Capacity, State
from shared.model_folder import read_model_info
from shared.service import Service
from tests.mesh.fake_engine import FakeEngine

READY_TIMEOUT_S = 20
DEFAULT_CAPACITY = Capacity(256, 16, 8, 64, 2048)
TEXT = "The shoal turns as one, and no fish gives the order. "


@dataclass
class Mesh:
    """Its services by name, and where the gateway listens."""

    services: dict[str, Service]
    tasks: dict[str, asyncio.Task]
    engine: FakeEngine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.services['gateway'].port}"

    @property
    def core(self):
        return self.services["scheduler"]._core

    async def until_ready(self) -> None:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while self.services["gateway"].status().state != State.READY:
                await asyncio.sleep(0.02)

    async def until_idle(self) -> None:
        """Nothing open anywhere, every block free. Times out otherwise."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while any(service.status().load for service in self.services.values()):
                await asyncio.sleep(0.02)
        for worker in self.core.workers.values():
            assert worker.pool.num_free == worker.pool.num_blocks

    async def lose(self, name: str) -> None:
        """Ends a service the hard way: its sockets close, nobody drains."""
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)


@asynccontextmanager
async def running_mesh(
    directory: Path, capacity: Capacity = DEFAULT_CAPACITY, step_s: float = 0.002
):
    ids = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json")).encode(TEXT).ids
    info = read_model_info(EMBEDDED_MODEL, [], capacity.max_model_len)
    engine = FakeEngine(info, capacity, ids, step_s)
    at = {"mesh_dir": directory, "instance": "0"}
    services: dict[str, Service] = {
        "scheduler": SchedulerService(SchedulerConfig(**at, max_waiting=16)),
        "tokenizer": TokenizerService(TokenizerConfig(**at, max_model_len=capacity.max_model_len)),
        "worker": WorkerService(WorkerConfig(**at), lambda config, progress: engine),
        "gateway": GatewayService(GatewayConfig(**at, port=0)),
    }
    tasks = {name: asyncio.create_task(service.run()) for name, service in services.items()}
    mesh = Mesh(services, tasks, engine)
    try:
        await mesh.until_ready()
        yield mesh
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
