"""Files and batches, as one API."""

from aiohttp import web

from services.gateway.api import Api, Core
from services.gateway.apis.batches.endpoint import Batches
from services.gateway.apis.batches.files import Files
from services.gateway.apis.batches.runner import BatchRunner


class BatchesApi(Api):
    """Without ``batch-dir`` every route returns an error."""

    cheap_routes = ("/v1/batches/{batch_id}/cancel",)

    def __init__(self, core: Core) -> None:
        """Raises ConfigError."""
        folder, self._runner = core.config.batch_dir, None
        if folder is not None:
            self._runner = BatchRunner(folder, core.config, core.internal_socket)
        self._files = Files(self._runner, core.admission, core.config)
        if folder is not None:
            core.media.find = self._files.image
        self._batches = Batches(self._runner)

    def routes(self) -> list[web.RouteDef]:
        return [*self._files.routes(), *self._batches.routes()]

    async def run(self) -> None:
        if self._runner is not None:
            await self._runner.run()

    async def drain(self) -> None:
        if self._runner is not None:
            await self._runner.stop()

    async def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
