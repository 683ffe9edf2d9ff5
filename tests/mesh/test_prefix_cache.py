"""The client's view of the prefix cache, through all four services; a fake engine checks that the
blocks really hold everything a plan calls cached."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from services.gateway.service import GatewayService
from shared.link.address import admin_path
from shared.process.admin import AdminServer
from shared.settings.gateway import GatewayConfig
from tests.mesh.mesh import Mesh, running_mesh

PROMPT = list(range(100, 140))  # 2.5 blocks


def client_of(mesh: Mesh) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{mesh.url()}/v1", api_key="none", max_retries=0, timeout=30)


async def complete(client: AsyncOpenAI, **fields: Any) -> tuple[str, int]:
    """The text and the number of cached tokens."""
    arguments: Any = {"model": "shoal-tiny", "prompt": PROMPT, "max_tokens": 20} | fields
    reply = await client.completions.create(**arguments)
    return reply.choices[0].text, reply.usage.prompt_tokens_details.cached_tokens


async def test_a_prompt_that_came_before_is_cached_and_its_text_the_same(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        text, num_cached = await complete(client)
        assert num_cached == 0
        assert await complete(client) == (text, 32)
        assert await complete(client, stop=["shoal"]) == ("\N{REPLACEMENT CHARACTER}The ", 32)
        stream = await client.completions.create(
            model="shoal-tiny", prompt=PROMPT, max_tokens=20, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage
        assert chunks[-1].usage.prompt_tokens_details
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 32
        await mesh.until_idle()


async def test_each_salt_has_a_cache_of_its_own(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        salts = ["a", "b", "a"]
        cached = [await complete(client, extra_body={"cache_salt": salt}) for salt in salts]
        assert [num for _, num in cached] == [0, 0, 32]
        assert (await complete(client))[1] == 0


@pytest.mark.parametrize("is_shared", [False, True])
async def test_keys_share_a_cache_only_where_the_setting_says_so(tmp_path: Path, is_shared: bool):
    keys: Any = ["key-of-ann", "key-of-bob"]
    config = GatewayConfig(
        mesh_dir=tmp_path, port=0, instance="keys", api_key=keys, share_prefix_cache=is_shared
    )
    async with running_mesh(tmp_path) as mesh:
        mesh.start("gateway-1", GatewayService(config))
        await mesh.until_ready()
        url = f"{mesh.url('gateway-1')}/v1"
        for number, key in enumerate(keys):
            async with AsyncOpenAI(base_url=url, api_key=key, timeout=30) as client:
                cached = [(await complete(client))[1] for _ in range(2)]
                assert cached == [32 if number and is_shared else 0, 32]


async def test_the_cache_is_emptied_at_the_admin_port(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        await complete(client)
        scheduler = mesh.services["scheduler"]
        config = scheduler._config
        path = admin_path(config.mesh_dir, "scheduler", config.instance)
        async with (
            AdminServer(scheduler, "scheduler", config),
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
        ):
            async with session.post("http://admin/reset_prefix_cache") as response:
                assert response.status == 403
            headers = {"X-Shoal-Admin": "1"}
            where = "http://admin/reset_prefix_cache"
            async with session.post(where, headers=headers) as response:
                assert response.status == 200
            async with session.get("http://admin/reset_prefix_cache") as response:
                assert response.status == 405
        assert (await complete(client))[1] == 0
