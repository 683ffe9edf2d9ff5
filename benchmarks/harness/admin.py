"""Reads metrics from the admin ports of ``shoal serve``."""

from pathlib import Path

import aiohttp


async def metrics_of(service: str, mesh_dir: Path) -> dict[str, float]:
    """Values by name, with labels as written, of the only replica of ``service``; for a worker with
    ranks, of the first rank."""
    found = mesh_dir.glob(f"*/admin.{service}-*.sock")
    (path,) = (path for path in found if ".rank" not in path.name)
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
        session.get("http://admin/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}
