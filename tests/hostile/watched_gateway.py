"""A real gateway with a watched event loop: ``python -m tests.hostile.watched_gateway``."""

import asyncio

from services.gateway.service import GatewayService
from shared.process.service import main
from shared.settings.gateway import GatewayConfig
from tests.hostile.watched import watch


class WatchedGateway(GatewayService):
    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch("gateway"))
            await super().run()


if __name__ == "__main__":
    main("gateway", GatewayConfig, WatchedGateway)
