"""One id through the logs of all four services, each of which tells it once."""

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shared.config.gateway import GatewayConfig
from shared.log import set_up
from shared.messages import Capacity
from tests.conftest import Lines
from tests.mesh.mesh import DEFAULT_CAPACITY, running_mesh

GATEWAY, TOKENIZER = "request ended", "prompt ended"
SCHEDULER, WORKER = "sequence ended", "sequence left its slot"
TEXT = "/v1/completions"

StepLogprobs = dict[str, list[dict[str, Any]]]


@pytest.fixture
def scored_logits(log_lines: Lines) -> Callable[[str], StepLogprobs]:
    """The lines that have a request's id, by the hop that wrote them."""
    seen: list[dict[str, Any]] = []

    def scored_logits(request: str) -> StepLogprobs:
        seen.extend(json.loads(line) for line in log_lines() if line)
        told: StepLogprobs = {}
        for line in seen:
            if line.get("request") == request:
                told.setdefault(line["message"], []).append(line)
        return told

    return scored_logits


@asynccontextmanager
async def mesh_and_client(
    directory: Path, capacity: Capacity = DEFAULT_CAPACITY, log_requests: bool = True
):
    set_up("mesh", GatewayConfig(log_format="json", log_requests=log_requests))
    async with running_mesh(directory, capacity) as mesh, aiohttp.ClientSession(mesh.url()) as http:
        yield mesh, http


def completion(http: aiohttp.ClientSession, request: str, **body: Any):
    body = {"prompt": [5] * 3, "max_tokens": 7, **body}
    return http.post(TEXT, json=body, headers={"X-Request-Id": request})


async def until_all_have_told(
    mesh, scored_logits: Callable[[str], StepLogprobs], request: str
) -> StepLogprobs:
    """The worker is the last to tell, with the plan after the end."""
    await mesh.until(lambda: WORKER in scored_logits(request))
    await mesh.until_idle()
    return scored_logits(request)


async def test_a_request_is_told_once_by_each_service(tmp_path: Path, scored_logits) -> None:
    async with mesh_and_client(tmp_path) as (mesh, http):
        async with completion(http, "mine") as response:
            assert response.status == 200
            await response.read()
        told = await until_all_have_told(mesh, scored_logits, "mine")
    assert {hop: len(lines) for hop, lines in told.items()} == dict.fromkeys(
        (GATEWAY, TOKENIZER, SCHEDULER, WORKER), 1
    )
    gateway, tokenizer = told[GATEWAY][0], told[TOKENIZER][0]
    scheduler, worker = told[SCHEDULER][0], told[WORKER][0]
    assert (gateway["route"], gateway["status"], gateway["model"]) == (TEXT, 200, "shoal-tiny")
    assert (gateway["num_prompt_tokens"], gateway["num_output_tokens"]) == (3, 7)
    assert 0 < gateway["ttft_s"] <= gateway["total_s"]
    assert gateway["num_replays"] == 0
    assert "code" not in gateway
    assert (tokenizer["num_prompt_tokens"], tokenizer["reason"]) == (3, "finished")
    assert 0 < tokenizer["prepare_s"] < gateway["total_s"]
    assert (scheduler["reason"], scheduler["attempt"]) == ("length", 1)
    assert scheduler["worker"] == mesh.services["worker"]._config.instance
    assert 0 < scheduler["queued_s"] < gateway["total_s"]
    assert (scheduler["num_preemptions"], scheduler["num_worker_deaths"]) == (0, 0)
    assert worker["num_steps"] == 7
    assert scheduler["name"] == worker["name"] == tokenizer["name"] + "/0"
    assert tokenizer["name"].startswith("mine~")


async def test_every_prompt_and_every_choice_is_told(tmp_path: Path, scored_logits) -> None:
    async with mesh_and_client(tmp_path) as (mesh, http):
        async with completion(http, "many", prompt=[[5], [6, 7]], n=2) as response:
            assert response.status == 200
        await mesh.until(lambda: len(scored_logits("many").get(WORKER, [])) == 4)
        told = scored_logits("many")
    assert {hop: len(lines) for hop, lines in told.items()} == {
        GATEWAY: 1, TOKENIZER: 2, SCHEDULER: 4, WORKER: 4,
    }  # fmt: skip
    assert told[GATEWAY][0]["num_prompt_tokens"] == 3
    assert told[GATEWAY][0]["num_output_tokens"] == 28
    assert len({line["name"] for line in told[WORKER]}) == 4


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_is_told_as_such(
    tmp_path: Path, scored_logits, is_stream: bool
) -> None:
    async with mesh_and_client(tmp_path) as (mesh, http):
        request = asyncio.ensure_future(completion(http, "gone", max_tokens=1000, stream=is_stream))
        await mesh.until(lambda: any(each.emitted for each in mesh.core.sequences.values()))
        if is_stream:
            (await request).close()
        request.cancel()
        told = await until_all_have_told(mesh, scored_logits, "gone")
    assert {hop: len(lines) for hop, lines in told.items()} == dict.fromkeys(
        (GATEWAY, TOKENIZER, SCHEDULER, WORKER), 1
    )
    assert told[GATEWAY][0]["code"] == "client_left"
    assert told[TOKENIZER][0]["reason"] == told[SCHEDULER][0]["reason"] == "cancelled"


async def test_a_refusal_is_told_as_far_down_as_it_came(tmp_path: Path, scored_logits) -> None:
    capacity = Capacity(64, 16, 4, 64, 128)
    async with mesh_and_client(tmp_path, capacity) as (mesh, http):
        for request, body, status in [
            ("wrong", {"temperature": 3}, 400),
            ("long", {"prompt": [5] * 100, "max_tokens": 100}, 400),
        ]:
            async with completion(http, request, **body) as response:
                assert response.status == status
                code = (await response.json())["error"]["code"]
            (line,) = scored_logits(request)[GATEWAY]
            assert (line["status"], line["code"]) == (status, code)
        await mesh.until_idle()
    assert scored_logits("wrong").keys() == {GATEWAY}
    assert "model" not in scored_logits("wrong")[GATEWAY][0]
    long = scored_logits("long")
    assert long.keys() == {GATEWAY, TOKENIZER, SCHEDULER}
    assert long[GATEWAY][0]["num_output_tokens"] == 0
    assert long[TOKENIZER][0]["reason"] == long[SCHEDULER][0]["reason"] == code
    assert len(long[SCHEDULER]) == 1


async def test_a_route_that_is_none_is_told_and_a_probe_is_not(
    tmp_path: Path, scored_logits
) -> None:
    async with mesh_and_client(tmp_path) as (_, http):
        for path in ("/nothing", "/v1/models", "/health", "/ready", "/ping", "/load", "/metrics"):
            async with http.get(path, headers={"X-Request-Id": "looking"}) as response:
                assert response.status == (404 if path == "/nothing" else 200)
    lines = scored_logits("looking")[GATEWAY]
    assert [(line["route"], line["status"], line.get("code")) for line in lines] == [
        ("unknown", 404, "not_found"),
        ("/v1/models", 200, None),
    ]


async def test_a_replay_is_told_as_another_attempt(tmp_path: Path, scored_logits) -> None:
    async with mesh_and_client(tmp_path) as (mesh, http):
        request = asyncio.ensure_future(completion(http, "twice", max_tokens=300))
        await mesh.until(lambda: any(each.emitted for each in mesh.core.sequences.values()))
        await mesh.lose("scheduler")
        mesh.start("scheduler")
        async with await request as response:
            assert response.status == 200
        await mesh.until(lambda: len(scored_logits("twice").get(WORKER, [])) == 2)
        await mesh.until_idle()
        told = scored_logits("twice")
    assert told[GATEWAY][0]["num_replays"] == 1
    assert told[GATEWAY][0]["num_output_tokens"] == 300
    assert [(line["attempt"], line["reason"]) for line in told[TOKENIZER]] == [
        (1, "scheduler_lost"),
        (2, "finished"),
    ]
    assert [line["attempt"] for line in told[WORKER]] == [1, 2]
    assert told[SCHEDULER][-1]["attempt"] == 2


async def test_with_log_requests_off_nobody_tells(tmp_path: Path, log_lines: Lines) -> None:
    async with mesh_and_client(tmp_path, log_requests=False) as (mesh, http):
        async with completion(http, "silent") as response:
            assert response.status == 200
        async with completion(http, "silent", n=0) as response:
            assert response.status == 400
        await mesh.until_idle()
    lines = log_lines()
    assert any("is up" in line for line in lines), "other lines go on"
    assert not any("silent" in line or "ended" in line for line in lines)
