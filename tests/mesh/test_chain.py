"""A request through all four services over real sockets; the engine alone is fake."""

import asyncio
import itertools
import socket
from pathlib import Path

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from services.scheduler.service import SchedulerService
from shared.config import SchedulerConfig
from shared.errors import ConfigError
from shared.messages import Capacity, StepPlan, StepResult
from shared.token_arrays import TokenArrays
from tests.mesh.mesh import TEXT, running_mesh

MESSAGES = [{"role": "user", "content": "Who leads the shoal?"}]


def client_of(mesh, gateway: str = "gateway") -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{mesh.url(gateway)}/v1", api_key="none", max_retries=0, timeout=30
    )


async def complete(client: AsyncOpenAI, num: int, **kwargs):
    return await client.completions.create(
        model="shoal-tiny", prompt="Once", max_tokens=num, **kwargs
    )


async def test_chat_and_completions_bring_what_the_worker_wrote(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        done = await complete(client, 40)
        assert done.choices[0].text == (TEXT * 3)[: len(done.choices[0].text)]
        assert done.choices[0].finish_reason == "length"
        assert done.usage.completion_tokens == 40
        chat = await client.chat.completions.create(
            model="shoal-tiny", messages=MESSAGES, max_tokens=5
        )
        assert TEXT.startswith(chat.choices[0].message.content)
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + 5
        await mesh.until_idle()


async def test_a_stream_joined_is_the_whole_text(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        whole = (await complete(client, 60)).choices[0].text
        stream = await complete(client, 60, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == whole


async def test_sixty_four_streams_at_once_each_end_once_and_leave_nothing(tmp_path: Path):
    capacity = Capacity(40, 16, 6, 32, 256)
    async with running_mesh(tmp_path, capacity, step_s=0) as mesh, client_of(mesh) as client:
        mesh.services["scheduler"]._core.max_waiting = 64
        texts = await asyncio.gather(*(complete(client, 20 + i) for i in range(64)))
        assert [done.usage.completion_tokens for done in texts] == [20 + i for i in range(64)]
        await mesh.until_idle()


async def test_a_stop_string_ends_the_text_before_it_and_frees_the_blocks(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        done = await complete(client, 1000, stop=["no fish", "zzz"])
        assert done.choices[0].text == "The shoal turns as one, and "
        assert done.choices[0].finish_reason == "stop"
        assert done.usage.completion_tokens < 40
        await mesh.until_idle()


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(tmp_path: Path, is_stream: bool):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        request = asyncio.create_task(complete(client, 2000, stream=is_stream))
        while not mesh.core.sequences:
            await asyncio.sleep(0.01)
        if is_stream:
            await (await request).close()
        else:
            request.cancel()
        await mesh.until_idle()


async def test_a_prompt_too_long_is_refused_with_both_numbers(tmp_path: Path):
    capacity = Capacity(64, 16, 4, 64, 128)
    async with running_mesh(tmp_path, capacity) as mesh, client_of(mesh) as client:
        with pytest.raises(openai.BadRequestError, match=r"(?s)128.*prompt has 200"):
            await client.completions.create(model="shoal-tiny", prompt=[5] * 200)
        with pytest.raises(openai.BadRequestError, match="max_tokens is 125"):
            await client.completions.create(model="shoal-tiny", prompt=[5] * 5, max_tokens=125)


async def test_a_full_line_is_a_429_with_retry_after_and_hurts_nobody(tmp_path: Path):
    capacity = Capacity(64, 16, 1, 64, 256)
    async with running_mesh(tmp_path, capacity, 0.005) as mesh, client_of(mesh) as client:
        mesh.core.max_waiting = 2
        tasks = [asyncio.create_task(complete(client, 30)) for _ in range(6)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [each for each in results if isinstance(each, openai.RateLimitError)]
        assert refused
        assert all(int(each.response.headers["retry-after"]) >= 1 for each in refused)
        good = [each for each in results if not isinstance(each, Exception)]
        assert len(good) + len(refused) == 6
        assert all(each.usage.completion_tokens == 30 for each in good)


@pytest.mark.parametrize("lost", ["tokenizer", "scheduler", "worker"])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_service_that_is_lost_and_comes_back_is_not_noticed(
    tmp_path: Path, lost: str, is_stream: bool
):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        request = asyncio.create_task(complete(client, 300, stream=is_stream))
        await mesh.until(lambda: any(len(s.emitted) > 20 for s in mesh.core.sequences.values()))
        await mesh.lose(lost)
        mesh.start(lost)
        reply = await request
        if is_stream:
            text = "".join([chunk.choices[0].text async for chunk in reply])
        else:
            text = reply.choices[0].text
            assert reply.usage.completion_tokens == 300
        assert text == (TEXT * 40)[: len(text)]
        assert len(text) > 500
        await mesh.until_idle()


async def test_what_no_service_takes_over_in_time_ends_with_an_error(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        mesh.services["gateway"]._mesh._replay_s = 0.3
        stream = await complete(client, 2000, stream=True)
        await anext(stream)
        await mesh.lose("tokenizer")
        with pytest.raises(openai.APIError, match="no tokenizer is connected"):
            async for _ in stream:
                pass


async def test_a_request_is_replayed_twice_and_no_more(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        stream = await complete(client, 2000, stream=True)
        reading = asyncio.create_task(anext(stream))
        for _ in range(3):
            await mesh.until(lambda: mesh.core.sequences)
            await mesh.lose("tokenizer")
            await mesh.until(lambda: not mesh.core.sequences)
            mesh.start("tokenizer")
            await reading
        with pytest.raises(openai.APIError, match="3 services died"):
            async for _ in stream:
                pass
        await mesh.until_idle()


async def test_a_mesh_without_worker_is_not_ready_and_answers_503(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        await mesh.lose("worker")
        with pytest.raises(openai.InternalServerError, match="no worker") as caught:
            await complete(client, 5)
        assert caught.value.status_code == 503


@pytest.mark.parametrize("leaving", ["tokenizer", "scheduler", "worker"])
async def test_a_service_that_drains_leaves_only_when_its_streams_have_ended(
    tmp_path: Path, leaving: str
):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        await complete(client, 3)
        stream = await complete(client, 200, stream=True)
        await anext(stream)
        draining = asyncio.create_task(mesh.services[leaving].drain())
        num_chunks = len([chunk async for chunk in stream])
        assert num_chunks > 100
        await asyncio.wait_for(draining, 5)


async def test_when_no_worker_comes_back_in_time_what_waits_fails(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        mesh.services["scheduler"]._config = SchedulerConfig(worker_grace_s=0.2)
        stream = await complete(client, 2000, stream=True)
        await anext(stream)
        await mesh.lose("worker")
        with pytest.raises(openai.APIError, match=r"within 0\.2 s"):
            async for _ in stream:
                pass
        await mesh.until_idle()


async def test_a_worker_attaches_to_one_scheduler_and_refuses_a_second(tmp_path: Path, caplog):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        second = SchedulerService(SchedulerConfig(mesh_dir=tmp_path, instance="second"))
        mesh.start("second", second)
        async with asyncio.timeout(10):
            while "so not to second" not in caplog.text:
                await asyncio.sleep(0.02)
        assert (await complete(client, 5)).usage.completion_tokens == 5


async def test_a_scheduler_that_cannot_listen_leaves_no_socket(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = SchedulerConfig(mesh_dir=tmp_path, listen_address=address, insecure_tcp=True)
        with pytest.raises(ConfigError, match="in use"):
            await SchedulerService(config).run()
    assert list(tmp_path.iterdir()) == []


async def test_a_request_goes_on_after_a_result_whose_parts_do_not_fit(tmp_path: Path, caplog):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        step, num_steps = mesh.engine.step, itertools.count(1)

        def misfit(plan: StepPlan, ids: np.ndarray) -> tuple[StepResult, TokenArrays]:
            result, arrays = step(plan, ids)
            if next(num_steps) == 5:
                arrays = arrays._replace(ids=np.append(arrays.ids, arrays.ids))
            return result, arrays

        mesh.engine.step = misfit
        done = await complete(client, 40)
        assert done.choices[0].text == (TEXT * 3)[: len(done.choices[0].text)]
        assert done.usage.completion_tokens == 40
        assert "is down: a bad message" in caplog.text
        await mesh.until_idle()
