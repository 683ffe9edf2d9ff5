"""`docker stack deploy` on a real swarm: scaled, updated, killed and drained under load."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.harness.docker_engine import NoEngine, provide_base_images, running_engine
from shared.link.keys import SERVICES
from tests.certificate import make_certificate
from tests.compose.load import loaded, progress
from tests.compose.second_engine import second_engine
from tests.compose.swarm import SETTINGS, Node, Swarm, running_swarm

pytestmark = [
    pytest.mark.compose,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

LONG_STREAM = 192  # tokens


@pytest.fixture(scope="module")
def engine():
    try:
        with running_engine() as environment:
            provide_base_images(environment)
            yield environment
    except NoEngine as reason:
        pytest.skip(str(reason))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(engine: dict[str, str]) -> AsyncIterator[Swarm]:
    with TemporaryDirectory() as folder:
        async with running_swarm(engine, Path(folder)) as swarm:
            yield swarm


async def test_services_grow_and_shrink_under_load_without_a_failed_request(swarm: Swarm):
    """Two schedulers are two cells."""
    async with loaded(swarm.url) as load:
        await progress(load)
        await swarm.scale(**dict.fromkeys(SERVICES, 2))
        for service in SERVICES:
            await swarm.until_all_work(service, 2)
        await progress(load)
        await swarm.scale(**dict.fromkeys(SERVICES, 1))
        assert [len(await swarm.tasks(service)) for service in SERVICES] == [1, 1, 1, 1]
        await progress(load)


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_is_updated_under_load_without_a_failed_request(swarm: Swarm, service: str):
    async with loaded(swarm.url, LONG_STREAM) as load:
        await progress(load)
        old = await swarm.tasks(service)
        await swarm.roll(service)
        assert await swarm.has_updated(service)
        (new,) = await swarm.tasks(service)
        assert new not in old
        await progress(load)


@pytest.mark.parametrize("service", ["tokenizer", "scheduler", "worker"])
async def test_killed_services_come_back_unnoticed(swarm: Swarm, service: str):
    async with loaded(swarm.url, LONG_STREAM) as load:
        await progress(load)
        (victim,) = await swarm.tasks(service)
        await swarm.kill(victim)
        await swarm.until_replaced(service, [victim])
        await swarm.until_whole()
        await progress(load)


async def test_other_settings_are_rolled_out_to_all_services_under_load(swarm: Swarm):
    """All at the same time, with two cells."""
    nums = {"gateway": 1, "tokenizer": 1, "scheduler": 2, "worker": 2}
    await swarm.scale(**nums)
    old = {service: await swarm.tasks(service) for service in nums}
    async with loaded(swarm.url) as load:
        await progress(load)
        swarm.settings.write_text(f"{SETTINGS}SHOAL_LOG_LEVEL=warning\n")
        await swarm.deploy(SCHEDULERS="2", WORKERS="2")
        for service, num in nums.items():
            await swarm.until_replaced(service, old[service], num)
        await swarm.until_whole()
        await progress(load)


async def test_clients_need_a_key_and_the_port_speaks_https_where_files_say_so(
    swarm: Swarm, tmp_path: Path
):
    keys, certificate = tmp_path / "keys", tmp_path / "certificate.pem"
    keys.write_text("a-key-of-a-client\n")
    make_certificate(certificate)
    old = {service: await swarm.tasks(service) for service in ("edge", "gateway")}
    await swarm.deploy(
        *("compose/swarm-api-keys.yml", "compose/swarm-tls.yml"),
        SHOAL_API_KEYS=str(keys),
        SHOAL_CERTIFICATE=str(certificate),
    )
    new = {service: await swarm.until_replaced(service, tasks) for service, tasks in old.items()}
    trusting = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=certificate))
    url = f"https://127.0.0.1:{swarm.port}"
    async with aiohttp.ClientSession(url, connector=trusting) as session, asyncio.timeout(60):
        while await status_for(session, "wrong") != 401:  # the old gateway is still leaving
            await asyncio.sleep(0.3)
        assert await status_for(session, "a-key-of-a-client") == 200
    await swarm.deploy()
    for service, tasks in new.items():
        await swarm.until_replaced(service, tasks)
    await swarm.until_whole()


async def status_for(session: aiohttp.ClientSession, key: str) -> int:
    async with session.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) as response:
        return response.status


async def test_a_node_is_drained_under_load_without_a_failed_request(
    engine: dict[str, str], swarm: Swarm
):
    images = [f"shoal-{name}:test" for name in ("gateway", "tokenizer", "scheduler", "worker-cpu")]
    try:
        with second_engine(engine, images) as second:
            async with swarm.joined(second) as node:
                await leave_node(swarm, node)
    except NoEngine as reason:
        pytest.skip(str(reason))


async def leave_node(swarm: Swarm, node: Node) -> None:
    for num in (1, 2):  # the second task of each comes to the new node
        await swarm.scale(**dict.fromkeys(SERVICES, num))
    there = {service: await swarm.tasks(service, node.id) for service in SERVICES}
    assert [len(tasks) for tasks in there.values()] == [1, 1, 1, 1]
    async with loaded(swarm.url, LONG_STREAM) as load:
        await node.until_all_work()
        await progress(load)
        await swarm.docker("node", "update", "--availability", "drain", node.id)
        for service, tasks in there.items():
            await swarm.until_replaced(service, tasks, num=2)
            assert not await swarm.tasks(service, node.id)
        await swarm.until_whole()
        await progress(load)
