"""Many choices, prompts, gateways and logprobs, in one event loop with a fake engine."""

import asyncio
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from services.gateway.service import GatewayService
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.gateway import GatewayConfig
from shared.wire.messages import WINDOW_TOKENS, Capacity
from tests.mesh.fake_engine import made_up_logprobs
from tests.mesh.mesh import TEXT, Mesh, running_mesh

NAMED_BY_ID = {"return_tokens_as_token_ids": True, "return_token_ids": True}


def client_of(mesh: Mesh, gateway: str = "gateway") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{mesh.url(gateway)}/v1", api_key="none", max_retries=0)


async def test_every_choice_of_every_prompt_ends_once_with_its_own_text(tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    ids, prompts = tokenizer.encode(TEXT).ids, ["a", "b b", "c"]
    all_ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        mesh.engine.starts_at = lambda prompt_ids, choice: 3 * all_ids.index(prompt_ids) + choice
        done = await client.completions.create(
            model="shoal-tiny", prompt=prompts, n=3, max_tokens=10
        )
        assert [choice.index for choice in done.choices] == list(range(9))
        written = [tokenizer.decode((ids * 2)[start : start + 10]) for start in range(9)]
        assert [choice.text for choice in done.choices] == written
        assert len(set(written)) == 9
        assert done.usage
        assert done.usage.completion_tokens == 90
        await mesh.until_idle()


async def test_one_prompt_too_long_refuses_all_of_a_list(tmp_path: Path):
    capacity = Capacity(64, 16, 8, 64, 128)
    async with running_mesh(tmp_path, capacity) as mesh, aiohttp.ClientSession() as session:
        body = {"prompt": [[5] * 4, [5] * 200, [5] * 4], "max_tokens": 50, "stream": True}
        async with session.post(f"{mesh.url()}/v1/completions", json=body) as response:
            assert response.status == 400
        await mesh.until_idle()


@pytest.mark.parametrize("num", [3, -1])
async def test_logprobs_match_the_worker(tmp_path: Path, num: int):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        reply = await client.completions.create(
            model="shoal-tiny", prompt="a", max_tokens=40, logprobs=num, extra_body=NAMED_BY_ID
        )
        (choice,) = reply.model_dump()["choices"]
        logprobs = choice["logprobs"]
        columns = (choice["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"])
        assert len(choice["token_ids"]) == 40
        for position, (token, own, top) in enumerate(zip(*columns, strict=True)):
            truth = made_up_logprobs(position, 8192)
            assert own == truth[token]
            likeliest = np.argsort(-truth)[: num if num > 0 else None]
            expected = {f"token_id:{each}": truth[each] for each in likeliest}
            assert top == expected | {f"token_id:{token}": truth[token]}
        await mesh.until_idle()


async def test_a_paused_sequence_is_not_computed_and_gives_up_its_slot(tmp_path: Path):
    capacity = Capacity(400, 16, 1, 64, 2048)
    async with running_mesh(tmp_path, capacity, step_s=0) as mesh, client_of(mesh) as client:
        body = {"prompt": "a", "max_tokens": 2000, "stream": True, "logprobs": -1}
        async with aiohttp.ClientSession(read_bufsize=1) as session:
            response = await session.post(f"{mesh.url()}/v1/completions", json=body)
            await mesh.until(lambda: any(not s.has_credit for s in mesh.core.sequences.values()))
            (paused,) = mesh.core.sequences.values()
            assert len(paused.emitted) < 1000
            done = await client.completions.create(model="shoal-tiny", prompt="b", max_tokens=20)
            assert done.usage
            assert done.usage.completion_tokens == 20, "there is one slot, and it was given up"
            response.close()
        await mesh.until_idle()


async def test_a_client_that_reads_gets_more_than_a_window(tmp_path: Path):
    async with running_mesh(tmp_path, step_s=0) as mesh, client_of(mesh) as client:
        num = 5 * WINDOW_TOKENS
        done = await client.completions.create(model="shoal-tiny", prompt="a", max_tokens=num)
        assert done.usage
        assert done.usage.completion_tokens == num


async def test_a_request_is_aborted_through_another_gateway(tmp_path: Path):
    async with running_mesh(tmp_path, num_gateways=2) as mesh, client_of(mesh) as client:
        request = asyncio.create_task(
            client.completions.create(
                model="shoal-tiny",
                prompt="a",
                max_tokens=2000,
                extra_headers={"X-Request-Id": "me"},
            )
        )
        await mesh.until(lambda: mesh.core.sequences)
        async with aiohttp.ClientSession() as session:
            url = f"{mesh.url('gateway-1')}/abort_requests"
            async with session.post(url, json={"request_ids": ["me"]}) as response:
                assert await response.json() == {"aborted": [], "forwarded": ["me"]}
        (choice,) = (await request).model_dump()["choices"]
        assert choice["finish_reason"] == "abort"
        await mesh.until_idle()


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


async def test_work_is_shared_among_tokenizers_and_workers(tmp_path: Path):
    async with (
        running_mesh(tmp_path, num_tokenizers=2, num_workers=2) as mesh,
        client_of(mesh) as client,
    ):
        requests = [
            client.completions.create(model="shoal-tiny", prompt="a", max_tokens=30)
            for _ in range(16)
        ]
        await asyncio.gather(*requests)
        for name in ("tokenizer", "tokenizer-1", "worker", "worker-1"):
            assert mesh.services[name].status().num_steps > 0
        await mesh.until_idle()


async def test_of_two_that_wait_the_urgent_one_is_first(tmp_path: Path):
    capacity = Capacity(400, 16, 1, 64, 2048)
    async with running_mesh(tmp_path, capacity) as mesh, client_of(mesh) as client:
        ends: list[str] = []

        async def complete(name: str, num: int, priority: int) -> None:
            await client.completions.create(
                model="shoal-tiny", prompt=name, max_tokens=num, extra_body={"priority": priority}
            )
            ends.append(name)

        running = asyncio.create_task(complete("running", 100, 0))
        await mesh.until(lambda: mesh.core.sequences)
        later = [asyncio.create_task(complete("patient", 5, 1))]
        await mesh.until(lambda: len(mesh.core.queues.waiting) == 1)
        later.append(asyncio.create_task(complete("urgent", 5, 0)))
        await asyncio.gather(running, *later)
        assert ends == ["running", "urgent", "patient"]


async def test_a_text_is_tokenized_and_back_by_any_tokenizer(tmp_path: Path):
    async with running_mesh(tmp_path, num_tokenizers=2) as mesh, aiohttp.ClientSession() as session:
        for text in ("The shoal", "Grüße 👋"):
            async with session.post(f"{mesh.url()}/tokenize", json={"prompt": text}) as response:
                tokens = (await response.json())["tokens"]
            url = f"{mesh.url()}/detokenize"
            async with session.post(url, json={"tokens": tokens}) as response:
                assert await response.json() == {"prompt": text}
