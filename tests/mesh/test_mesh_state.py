"""``/v1/mesh`` about the services of a mesh, over real links."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from shared.wire.messages import REPORT_MINOR
from tests.mesh.mesh import Mesh, ask, running_mesh


async def until(mesh: Mesh, is_true, gateway: str = "gateway") -> dict[str, list[dict]]:
    async with asyncio.timeout(20):
        while not is_true(roles := await ask(mesh, gateway)):
            await asyncio.sleep(0.05)
    return roles


@asynccontextmanager
async def writing(mesh: Mesh, num_tokens: int):
    """A completion runs meanwhile."""
    body = {"prompt": "Who leads?", "max_tokens": num_tokens, "ignore_eos": True}
    async with aiohttp.ClientSession(mesh.url()) as http:
        task = asyncio.create_task(http.post("/v1/completions", json=body))
        try:
            yield
        finally:
            (await task).close()


async def test_every_gateway_lists_every_service_with_its_links(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, num_gateways=2, num_tokenizers=2, num_workers=2) as mesh:
        for gateway in ("gateway", "gateway-1"):
            roles = await until(
                mesh,
                lambda roles: all(
                    link["round_trip_ms"] is not None
                    for each in roles.values()
                    for service in each
                    for link in service["links"]
                ),
                gateway,
            )
            assert {role: len(each) for role, each in roles.items()} == {
                "gateway": 2,
                "tokenizer": 2,
                "scheduler": 1,
                "worker": 2,
            }
            below = {"gateway": "tokenizer", "tokenizer": "scheduler", "scheduler": "worker"}
            for role, services in roles.items():
                for service in services:
                    assert (service["state"], service["reason"]) == ("ready", "")
                    assert service["uptime_s"] > 0
                    assert service["stats"]["memory_bytes"] > 1 << 20
                    lower = [each["instance"] for each in roles.get(below.get(role, ""), [])]
                    assert [each["instance"] for each in service["links"]] == lower


async def test_the_work_of_workers_is_counted(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, step_s=0.002) as mesh, writing(mesh, 400):
        roles = await until(mesh, lambda roles: roles["worker"][0]["stats"]["tokens_per_s"] > 0)
        worker = roles["worker"][0]["stats"]
        capacity = mesh.engine.capacity
        assert (worker["slots_used"], worker["slots"]) == (1, capacity.max_num_seqs)
        assert 0 < worker["kv_blocks_used"] < worker["kv_blocks"] == capacity.num_blocks
        assert worker["kv_tokens"] == worker["kv_tokens_short"] > 0, "no layer has a window"
        assert 2 <= worker["step_ms"] < 1000
        assert worker["model"] == "shoal-tiny"
        assert roles["scheduler"][0]["stats"]["running"] == 1
        assert roles["tokenizer"][0]["stats"]["open_prompts"] == 1
        assert roles["gateway"][0]["stats"]["open_requests"] == 1


async def test_a_lost_service_is_listed_and_one_that_left_is_not(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, num_tokenizers=2, num_workers=2) as mesh:
        await ask(mesh)
        await mesh.lose("worker-1", says_bye=False)
        await mesh.lose("tokenizer-1", says_bye=True)
        roles = await until(
            mesh,
            lambda roles: (
                len(roles["tokenizer"]) == 1
                and any(each["state"] == "lost" for each in roles["worker"])
            ),
        )
        assert sorted(each["state"] for each in roles["worker"]) == ["lost", "ready"]


async def test_without_their_scheduler_workers_are_still_listed(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        await ask(mesh)
        await mesh.lose("scheduler", says_bye=False)
        roles = await until(mesh, lambda roles: roles["scheduler"][0]["state"] == "lost")
        assert [each["state"] for each in roles["worker"]] == ["suspect"]
        assert roles["tokenizer"][0]["state"] == "suspect"
        assert roles["tokenizer"][0]["reason"] == "no scheduler is connected"
        mesh.start("scheduler")
        roles = await until(mesh, lambda roles: roles["worker"][0]["state"] == "ready")
        assert sorted(each["state"] for each in roles["scheduler"]) == ["lost", "ready"]


async def test_services_of_an_older_protocol_are_not_asked(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, num_workers=2) as mesh:
        scheduler = mesh.services["scheduler"]
        old = next(iter(scheduler._workers.values()))
        old.hello = msgspec.structs.replace(old.hello, minor=REPORT_MINOR - 1)
        roles = await ask(mesh)
        workers = {each["instance"]: each for each in roles["worker"]}
        assert workers[old.hello.instance]["state"] == "ready"
        assert workers[old.hello.instance]["uptime_s"] is None
        assert workers[old.hello.instance]["stats"]["slots"] == mesh.engine.capacity.max_num_seqs


async def test_a_worker_that_hangs_is_a_suspect_and_holds_nobody_up_for_long(
    tmp_path: Path,
) -> None:
    async with running_mesh(tmp_path, num_workers=2) as mesh:
        hanging = mesh.services["worker-1"]
        hanging.on_message = lambda *_: None  # its link lives, but it answers nothing
        roles = await ask(mesh)
        states = {each["instance"]: each["state"] for each in roles["worker"]}
        assert states[hanging._config.instance] == "suspect"
        assert sorted(states.values()) == ["ready", "suspect"]
