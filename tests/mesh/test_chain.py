"""A request through all four services over real sockets, with a fake engine."""

import asyncio
import socket
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from services.scheduler.scheduler import Planned
from services.scheduler.service import SchedulerService
from services.worker.service import WorkerService
from shared.errors import ConfigError
from shared.link.link import Link
from shared.process.rate import UNKNOWN_RETRY_AFTER_S
from shared.settings.scheduler import SchedulerConfig
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Capacity, StepPlan, StepResult
from shared.wire.token_arrays import TokenArrays
from tests.mesh.mesh import TEXT, Mesh, running_mesh

MESSAGES: Any = [{"role": "user", "content": "Who leads the shoal?"}]


def client_of(mesh, gateway: str = "gateway") -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{mesh.url(gateway)}/v1", api_key="none", max_retries=0, timeout=30
    )


async def complete(client: AsyncOpenAI, num: int, **kwargs):
    return await client.completions.create(
        model="shoal-tiny", prompt="Once", max_tokens=num, **kwargs
    )


async def test_chat_and_completions_bring_the_text_of_the_worker(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        done = await complete(client, 40)
        assert done.choices[0].text == (TEXT * 3)[: len(done.choices[0].text)]
        assert done.choices[0].finish_reason == "length"
        assert done.usage.completion_tokens == 40
        chat = await client.chat.completions.create(
            model="shoal-tiny", messages=MESSAGES, max_tokens=5
        )
        assert TEXT.startswith(chat.choices[0].message.content or "nothing")
        assert chat.usage
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + 5
        await mesh.until_idle()


async def test_a_prompt_of_any_kind_is_cut_to_its_last_tokens(tmp_path: Path):
    """Echo, counts and result match the computed prompt."""
    capacity = Capacity(64, 16, 4, 64, 256)
    async with running_mesh(tmp_path, capacity) as mesh, client_of(mesh) as client:
        text = TEXT * 3
        ids = mesh.services["tokenizer"]._text.encode(text).tolist()
        for prompt in (text, ids, ids * 6):
            extra: Any = {"truncate_prompt_tokens": 9, "return_token_ids": True}
            done = await client.completions.create(
                model="shoal-tiny", prompt=prompt, max_tokens=2, echo=True, extra_body=extra
            )
            (choice,) = done.choices
            assert choice.model_extra
            assert choice.model_extra["prompt_token_ids"] == ids[-9:]
            assert done.usage
            assert done.usage.prompt_tokens == 9
            tail = mesh.services["tokenizer"]._text.decode(ids[-9:])
            assert choice.text.startswith(tail)
        chat = await client.chat.completions.create(
            model="shoal-tiny", messages=MESSAGES * 60, max_tokens=200,
            extra_body={"truncate_prompt_tokens": -1},
        )  # fmt: skip
        assert chat.usage
        assert chat.usage.prompt_tokens == 256 - 200
        with pytest.raises(openai.BadRequestError, match="expected -1, or 1 to 254"):
            await complete(client, 2, extra_body={"truncate_prompt_tokens": 255})
        await mesh.until_idle()


async def test_a_stream_joined_is_the_whole_text(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        whole = (await complete(client, 60)).choices[0].text
        stream = await complete(client, 60, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == whole


async def test_a_result_makes_no_plan_for_another_worker_while_the_waiting_queue_is_empty(
    tmp_path: Path,
):
    async with running_mesh(tmp_path, num_workers=2) as mesh, client_of(mesh) as client:
        plan = mesh.core.plan
        num_calls: Counter[str] = Counter()

        def count(worker_id: str) -> Planned | None:
            planned = plan(worker_id)
            num_calls[worker_id] += 1
            num_calls["steps"] += 0 if planned is None else planned.plan.num_steps
            return planned

        mesh.core.plan = count
        await complete(client, 200)
        assert num_calls.pop("steps") >= 200
        assert min(num_calls.values()) < 50
        await mesh.until_idle()


async def test_a_prompt_too_long_is_refused_with_both_numbers(tmp_path: Path):
    capacity = Capacity(64, 16, 4, 64, 128)
    async with running_mesh(tmp_path, capacity) as mesh, client_of(mesh) as client:
        with pytest.raises(openai.BadRequestError, match=r"prompt has 200 ids; .* 128"):
            await client.completions.create(model="shoal-tiny", prompt=[5] * 200)
        with pytest.raises(openai.BadRequestError, match="max_tokens is 125"):
            await client.completions.create(model="shoal-tiny", prompt=[5] * 5, max_tokens=125)


async def test_a_full_waiting_queue_is_a_429_with_retry_after_and_fails_no_other_request(
    tmp_path: Path,
):
    capacity = Capacity(64, 16, 1, 64, 256)
    async with running_mesh(tmp_path, capacity, 0.005) as mesh, client_of(mesh) as client:
        mesh.core.max_waiting = 2
        tasks = [asyncio.create_task(complete(client, 30)) for _ in range(6)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [each for each in results if isinstance(each, openai.RateLimitError)]
        assert refused
        assert all(int(each.response.headers["retry-after"]) >= 1 for each in refused)
        good = [each for each in results if not isinstance(each, BaseException)]
        assert len(good) + len(refused) == 6
        assert all(each.usage.completion_tokens == 30 for each in good)


async def test_clients_that_leave_the_waiting_queue_count_for_retry_after(tmp_path: Path):
    async with (
        running_mesh(tmp_path, Capacity(256, 16, 1, 64, 2048)) as mesh,
        client_of(mesh) as client,
    ):
        mesh.core.max_waiting = 1
        staying = [asyncio.create_task(complete(client, 2000))]
        await mesh.until(lambda: mesh.core.sequences and not mesh.core.queues.waiting)
        for _ in range(5):
            leaving = asyncio.create_task(complete(client, 2000))
            await mesh.until(lambda: len(mesh.core.queues.waiting) == 1)
            leaving.cancel()
            await mesh.until(lambda: not mesh.core.queues.waiting)
        staying.append(asyncio.create_task(complete(client, 2000)))
        await mesh.until(lambda: len(mesh.core.queues.waiting) == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            await complete(client, 5)
        assert int(refused.value.response.headers["retry-after"]) < UNKNOWN_RETRY_AFTER_S
        for task in staying:
            task.cancel()
        await mesh.until_idle()


async def text_of(stream) -> str:
    return "".join([chunk.choices[0].text async for chunk in stream])


@asynccontextmanager
async def a_stream_that_stands_still(mesh: Mesh, client: AsyncOpenAI, num: int):
    """It has begun, and its next token comes at the end of the context."""
    stream = await complete(client, num, stream=True)
    await anext(stream)
    step, goes_on = mesh.engine.step, threading.Event()

    def waiting_step(plan: StepPlan, ids: np.ndarray) -> tuple[StepResult, TokenArrays]:
        goes_on.wait()
        return step(plan, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh.engine, "step", waiting_step)
        try:
            yield stream
        finally:
            goes_on.set()


async def give_up(mesh: Mesh, service: str, lower: str, stood_still: bool) -> None:
    """``service`` gives up its peer ``lower``, which soon returns."""
    link, other = mesh.services[service]._link, mesh.services[lower]._link
    (peer,) = [each for each in link.peers if each.hello.service == lower]
    link.drop(peer, "silent for 2 s")
    if stood_still:
        other._stood_still_s = time.monotonic()
    await mesh.until(lambda: any(each.hello.service == lower for each in link.peers))


@pytest.mark.parametrize("stood_still", [True, False])
async def test_a_worker_that_stood_still_is_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stood_still: bool
):
    monkeypatch.setattr(Link, "stood_still", False)
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        async with a_stream_that_stands_still(mesh, client, 40) as stream:
            await give_up(mesh, "scheduler", "worker", stood_still)
            (sequence,) = mesh.core.sequences.values()
            assert sequence.num_worker_deaths == (0 if stood_still else 1)
            assert sequence.is_isolated != stood_still
        await text_of(stream)
        await mesh.until_idle()


async def test_a_request_that_workers_died_of_is_not_run_again_for_a_while(
    tmp_path: Path, change: Any
):
    """With OpenAI's own client, which retries after a 500 by itself."""
    is_over = threading.Event()

    def hangs(plan: StepPlan, ids: np.ndarray) -> tuple[StepResult, TokenArrays]:
        is_over.wait()
        return StepResult(plan.step, []), TokenArrays()

    async with running_mesh(tmp_path) as mesh, client_of(mesh) as patient:
        client = patient.with_options(max_retries=2)
        request = asyncio.create_task(complete(client, 2000))
        for _ in range(2):
            mesh.engine.step = hangs
            await mesh.until(lambda: any(worker.in_flight for worker in mesh.core.workers.values()))
            await mesh.lose("worker", says_bye=False)
            await mesh.until(lambda: not mesh.core.workers)
            mesh.start("worker")
        is_over.set()
        with pytest.raises(openai.InternalServerError, match="2 workers died") as died:
            await request
        assert died.value.response.headers["x-should-retry"] == "false"
        await mesh.until_ready()
        with pytest.raises(openai.BadRequestError, match="not run again") as refused:
            await complete(client, 2000)
        assert 500 < int(refused.value.response.headers["retry-after"]) <= 600
        assert (await complete(client, 20)).usage.completion_tokens == 20
        assert change("shoal_quarantined_requests_total") == 1
        assert change("shoal_quarantine_refusals_total") == 1


async def test_a_mesh_without_worker_is_not_ready_and_answers_503(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        await mesh.lose("worker")
        with pytest.raises(openai.InternalServerError, match="no worker") as caught:
            await complete(client, 5)
        assert caught.value.status_code == 503


@pytest.mark.parametrize("has_smaller", [False, True])
async def test_waiting_requests_fail_if_no_suitable_worker_returns_in_time(
    tmp_path: Path, has_smaller: bool
):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        if has_smaller:
            engine = mesh.new_engine()
            engine.capacity = msgspec.structs.replace(engine.capacity, num_blocks=8)
            config = WorkerConfig(mesh_dir=tmp_path, instance="smaller")
            mesh.start("smaller", WorkerService(config, lambda *_: engine))
            await mesh.until(lambda: len(mesh.core.workers) == 2)
        mesh.services["scheduler"]._config = SchedulerConfig(worker_grace_s=0.2)
        stream = await complete(client, 2000, stream=True)
        await anext(stream)
        await mesh.lose("worker")
        with pytest.raises(openai.APIError, match=r"within 0\.2 s") as failed:
            async for _ in stream:
                pass
        assert failed.value.code == "no_worker"
        assert len(mesh.core.workers) == has_smaller
        await mesh.until_idle()


async def test_a_scheduler_that_cannot_listen_leaves_no_socket(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = SchedulerConfig(mesh_dir=tmp_path, listen_address=address, insecure_tcp=True)
        with pytest.raises(ConfigError, match="in use"):
            await SchedulerService(config).run()
    assert list(tmp_path.iterdir()) == []


async def test_a_prompt_is_shown_as_text_with_the_places_of_its_tokens(tmp_path: Path):
    async with running_mesh(tmp_path) as mesh, client_of(mesh) as client:
        asked: Any = {"return_prompt_text": True, "return_token_offsets": True}
        asked |= {"return_token_ids": True}
        create: Any = client.chat.completions.create
        fields = {"model": "shoal-tiny", "messages": MESSAGES, "max_tokens": 2, "extra_body": asked}
        whole = (await create(**fields)).model_extra
        stream = [chunk.model_extra async for chunk in await create(**fields, stream=True)]
        text_model = mesh.services["tokenizer"]._text
        text = text_model.render(MESSAGES)
        assert whole["prompt_text"] == text
        ids, places = whole["prompt_token_ids"], whole["token_offsets"]
        assert [text[start:end] for start, end in places] == [
            text_model.decode([each], skips_special_tokens=False) for each in ids
        ]
        for name in ("prompt_text", "token_offsets"):
            assert [each[name] for each in stream if name in each] == [whole[name]]
        asked = {"return_token_offsets": True, "truncate_prompt_tokens": 2}
        last = text_model.offsets("Who leads?", True).reshape(-1, 2).tolist()[-2:]
        for prompt, expected in (("Who leads?", last), (ids, None)):
            done = await client.completions.create(
                model="shoal-tiny", prompt=prompt, max_tokens=1, extra_body=asked
            )
            (choice,) = done.choices
            assert choice.model_extra
            assert choice.model_extra["token_offsets"] == expected
        async with aiohttp.ClientSession(mesh.url("gateway")) as http:
            body = {"prompt": "Who leads?"} | asked
            async with http.post("/tokenize", json=body) as response:
                counted = await response.json()
        assert (counted["count"], counted["token_offsets"]) == (2, last)
        await mesh.until_idle()
