"""One id through the logs of all four services, once in each."""

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shared.process.log import set_up
from shared.settings.gateway import GatewayConfig
from shared.wire.messages import Capacity
from tests.conftest import Lines
from tests.mesh.mesh import DEFAULT_CAPACITY, running_mesh

GATEWAY, TOKENIZER = "request ended", "prompt ended"
SCHEDULER, WORKER = "sequence ended", "sequence left its slot"
TEXT = "/v1/completions"

LinesByHop = dict[str, list[dict[str, Any]]]


@pytest.fixture
def lines_of(log_lines: Lines) -> Callable[[str], LinesByHop]:
    """The lines with a request's id, by hop."""
    seen: list[dict[str, Any]] = []

    def lines_of(request: str) -> LinesByHop:
        seen.extend(json.loads(line) for line in log_lines() if line)
        by_hop: LinesByHop = {}
        for line in seen:
            if line.get("request") == request:
                by_hop.setdefault(line["message"], []).append(line)
        return by_hop

    return lines_of


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


async def until_all_have_logged(
    mesh, lines_of: Callable[[str], LinesByHop], request: str
) -> LinesByHop:
    """The worker logs last, with the plan after the end."""
    await mesh.until(lambda: WORKER in lines_of(request))
    await mesh.until_idle()
    return lines_of(request)


async def test_a_request_is_logged_once_by_each_service(tmp_path: Path, lines_of) -> None:
    async with mesh_and_client(tmp_path) as (mesh, http):
        async with completion(http, "mine") as response:
            assert response.status == 200
            await response.read()
        by_hop = await until_all_have_logged(mesh, lines_of, "mine")
    assert {hop: len(lines) for hop, lines in by_hop.items()} == dict.fromkeys(
        (GATEWAY, TOKENIZER, SCHEDULER, WORKER), 1
    )
    gateway, tokenizer = by_hop[GATEWAY][0], by_hop[TOKENIZER][0]
    scheduler, worker = by_hop[SCHEDULER][0], by_hop[WORKER][0]
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


async def test_every_prompt_and_every_choice_is_logged(tmp_path: Path, lines_of) -> None:
    async with mesh_and_client(tmp_path) as (mesh, http):
        async with completion(http, "many", prompt=[[5], [6, 7]], n=2) as response:
            assert response.status == 200
        await mesh.until(lambda: len(lines_of("many").get(WORKER, [])) == 4)
        by_hop = lines_of("many")
    assert {hop: len(lines) for hop, lines in by_hop.items()} == {
        GATEWAY: 1, TOKENIZER: 2, SCHEDULER: 4, WORKER: 4,
    }  # fmt: skip
    assert by_hop[GATEWAY][0]["num_prompt_tokens"] == 3
    assert by_hop[GATEWAY][0]["num_output_tokens"] == 28
    assert len({line["name"] for line in by_hop[WORKER]}) == 4


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_is_logged_as_such(
    tmp_path: Path, lines_of, is_stream: bool
) -> None:
    async with mesh_and_client(tmp_path) as (mesh, http):
        request = asyncio.ensure_future(completion(http, "gone", max_tokens=1000, stream=is_stream))
        await mesh.until(lambda: any(each.emitted for each in mesh.core.sequences.values()))
        if is_stream:
            (await request).close()
        request.cancel()
        by_hop = await until_all_have_logged(mesh, lines_of, "gone")
    assert {hop: len(lines) for hop, lines in by_hop.items()} == dict.fromkeys(
        (GATEWAY, TOKENIZER, SCHEDULER, WORKER), 1
    )
    assert by_hop[GATEWAY][0]["code"] == "client_left"
    assert by_hop[TOKENIZER][0]["reason"] == by_hop[SCHEDULER][0]["reason"] == "cancelled"


async def test_a_refusal_is_logged_as_far_down_as_it_came(tmp_path: Path, lines_of) -> None:
    capacity = Capacity(64, 16, 4, 64, 128)
    async with mesh_and_client(tmp_path, capacity) as (mesh, http):
        bad: dict[str, dict[str, Any]] = {
            "wrong": {"temperature": 3},
            "long": {"prompt": [5] * 100, "max_tokens": 100},
        }
        for request, body in bad.items():
            async with completion(http, request, **body) as response:
                assert response.status == 400
                code = (await response.json())["error"]["code"]
            (line,) = lines_of(request)[GATEWAY]
            assert (line["status"], line["code"]) == (400, code)
        await mesh.until_idle()
    assert lines_of("wrong").keys() == {GATEWAY}
    assert "model" not in lines_of("wrong")[GATEWAY][0]
    long = lines_of("long")
    assert long.keys() == {GATEWAY, TOKENIZER, SCHEDULER}
    assert long[GATEWAY][0]["num_output_tokens"] == 0
    assert long[TOKENIZER][0]["reason"] == long[SCHEDULER][0]["reason"] == code
    assert len(long[SCHEDULER]) == 1


async def test_an_unknown_route_is_logged_and_a_probe_is_not(tmp_path: Path, lines_of) -> None:
    async with mesh_and_client(tmp_path) as (_, http):
        for path in ("/nothing", "/v1/models", "/health", "/ready", "/ping", "/load", "/metrics"):
            async with http.get(path, headers={"X-Request-Id": "looking"}) as response:
                assert response.status == (404 if path == "/nothing" else 200)
    lines = lines_of("looking")[GATEWAY]
    assert [(line["route"], line["status"], line.get("code")) for line in lines] == [
        ("unknown", 404, "not_found"),
        ("/v1/models", 200, None),
    ]


async def test_a_replay_is_logged_as_another_attempt(tmp_path: Path, lines_of) -> None:
    async with mesh_and_client(tmp_path) as (mesh, http):
        request = asyncio.ensure_future(completion(http, "twice", max_tokens=300))
        await mesh.until(lambda: any(each.emitted for each in mesh.core.sequences.values()))
        await mesh.lose("scheduler")
        mesh.start("scheduler")
        async with await request as response:
            assert response.status == 200
        await mesh.until(lambda: len(lines_of("twice").get(WORKER, [])) == 2)
        await mesh.until_idle()
        by_hop = lines_of("twice")
    assert by_hop[GATEWAY][0]["num_replays"] == 1
    assert by_hop[GATEWAY][0]["num_output_tokens"] == 300
    assert [(line["attempt"], line["reason"]) for line in by_hop[TOKENIZER]] == [
        (1, "scheduler_lost"),
        (2, "finished"),
    ]
    assert [line["attempt"] for line in by_hop[WORKER]] == [1, 2]
    assert by_hop[SCHEDULER][-1]["attempt"] == 2


async def test_with_log_requests_off_no_request_is_logged(tmp_path: Path, log_lines: Lines) -> None:
    async with mesh_and_client(tmp_path, log_requests=False) as (mesh, http):
        async with completion(http, "silent") as response:
            assert response.status == 200
        async with completion(http, "silent", n=0) as response:
            assert response.status == 400
        await mesh.until_idle()
    lines = log_lines()
    assert any("is up" in line for line in lines), "other lines go on"
    assert not any("silent" in line or "ended" in line for line in lines)
