"""Requests through any of several gateways and tokenizers, in one event loop with a fake engine."""

import asyncio
from pathlib import Path

import aiohttp

from services.gateway.service import GatewayService
from shared.settings.gateway import GatewayConfig
from tests.mesh.mesh import running_mesh


async def test_a_key_aborts_only_its_own_requests_through_any_gateway(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, aiohttp.ClientSession() as session:
        for number in (1, 2):
            config = GatewayConfig(
                mesh_dir=tmp_path, instance=f"g{number}", port=0, api_key=["ada", "bob"]
            )
            mesh.start(f"gateway-{number}", GatewayService(config))
        await mesh.until_ready()

        async def post(gateway: str, path: str, key: str, body: dict) -> dict:
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(mesh.url(gateway) + path, json=body, headers=headers) as reply:
                return await reply.json()

        body = {"prompt": "a", "max_tokens": 2000, "request_id": "me"}
        asked = asyncio.create_task(post("gateway-1", "/v1/completions", "ada", body))
        await mesh.until(lambda: mesh.core.sequences)
        for key in ("bob", "ada"):
            (sequence,) = mesh.core.sequences.values()
            num_before = len(sequence.emitted)
            reply = await post("gateway-2", "/abort_requests", key, {"request_ids": ["me"]})
            assert reply == {"aborted": [], "forwarded": ["me"]}
            if key == "bob":
                await mesh.until(lambda: len(sequence.emitted) > num_before + 20)  # noqa: B023
        assert (await asked)["choices"][0]["finish_reason"] == "abort"
        await mesh.until_idle()


async def test_a_text_is_tokenized_and_back_by_any_tokenizer(tmp_path: Path):
    async with running_mesh(tmp_path, num_tokenizers=2) as mesh, aiohttp.ClientSession() as session:
        for text in ("The shoal", "Grüße 👋"):
            async with session.post(f"{mesh.url()}/tokenize", json={"prompt": text}) as response:
                tokens = (await response.json())["tokens"]
            url = f"{mesh.url()}/detokenize"
            async with session.post(url, json={"tokens": tokens}) as response:
                assert await response.json() == {"prompt": text}
