"""The list of the mesh's services. ``tests/mesh/test_mesh_state.py`` has real ones."""

from pathlib import Path

import aiohttp

from tests.services.gateway.fakes import running_gateway


async def test_the_mesh_is_listed_unless_it_is_turned_off(tmp_path: Path) -> None:
    for flags, status in (({}, 200), ({"mesh_endpoint": False}, 404)):
        async with (
            running_gateway(tmp_path, **flags) as gateway,
            aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
            http.get("/v1/mesh") as response,
        ):
            assert response.status == status
            if status == 200:
                (service,) = (await response.json())["services"]
                assert (service["role"], service["state"]) == ("gateway", "starting")
