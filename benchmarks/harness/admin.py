"""What the services of ``shoal serve`` tell on their admin ports."""

from pathlib import Path

import aiohttp


async def metrics_of(service: str, mesh_dir: Path) -> dict[str, float]:
    """Values by name, with labels as they are written, of the only replica of ``service``: of a
    worker with several ranks, the first one's."""
    found = mesh_dir.glob(f"*/admin.{service}-*.sock")
    (path,) = (path for path in found if ".rank" not in path.name)
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
        session.get("http://admin/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}
