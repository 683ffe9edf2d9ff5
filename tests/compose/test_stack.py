"""`docker compose up` on a real engine: served, scaled and killed under load, and sealed."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from benchmarks.harness.docker_engine import ROOT
from benchmarks.harness.stack import CommandError, Stack, running_stack
from tests.certificate import make_certificate
from tests.compose.board import queries
from tests.compose.load import loaded, progress

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

LONG_STREAM = 192  # tokens
SAVED = 'shoal_kv_store_bytes_total{direction="save"}'
MOVED = 'shoal_moves_total{outcome="done",why="leaving"}'
REPLACE_WORKER = ("up", "-d", "--no-build", "--wait", "--force-recreate", "--no-deps", "worker")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(engine: dict[str, str]) -> AsyncIterator[Stack]:
    async with running_stack(engine) as stack:
        yield stack
    assert await stack.leftovers() == ""


async def test_the_openai_client_is_served(stack: Stack):
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["shoal-tiny"]
        question = [{"role": "user", "content": "What is 12 + 30?"}]
        asked: Any = {"model": "shoal-tiny", "messages": question, "temperature": 0}
        answer = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=5)
        assert "42" in answer.choices[0].message.content
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 5
        stream = await client.chat.completions.create(**asked, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(parts) == answer.choices[0].message.content
        answer = await client.chat.completions.create(**asked, extra_body={"guided_regex": "[0-9]"})
        assert answer.choices[0].message.content.isdecimal()


async def test_each_service_grows_and_shrinks_under_load_without_a_failed_request(stack: Stack):
    async with loaded(stack.url) as load:
        await progress(load)
        await stack.scale(gateway=2, tokenizer=3, worker=2)
        for service, num in {"gateway": 2, "tokenizer": 3, "worker": 2}.items():
            await stack.until_ready(service, num)
        await progress(load)
        await progress(load)
        for gateway in await stack.containers("gateway"):
            served = await stack.metrics(gateway)
            assert served['shoal_http_requests_total{route="/v1/completions",status="200"}'] > 0
        for service in ("tokenizer", "worker"):
            for container in await stack.containers(service):
                assert (await stack.status(container))["num_steps"] > 0, f"{service} had no work"
        await stack.scale(gateway=1, tokenizer=1, worker=1)
        assert len(await stack.containers("worker")) == 1
        await progress(load)


async def test_sequences_of_a_removed_worker_move_with_their_blocks(stack: Stack):
    """Between containers of one scheduler, by tcp with keys."""
    await stack.scale(scheduler=1, worker=2)
    await stack.until_ready("worker", 2)
    is_over = asyncio.Event()
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        clients = [asyncio.create_task(ask_anew(client, seed, is_over)) for seed in range(8)]
        await asyncio.sleep(2)
        await stack.scale(scheduler=1, worker=1)
        (scheduler,), (worker,) = [
            await stack.containers(service) for service in ("scheduler", "worker")
        ]
        is_over.set()
        await asyncio.gather(*clients)
        assert (await stack.metrics(scheduler))[MOVED] > 0
        assert (await stack.metrics(worker))["shoal_blocks_taken_bytes_total"] > 0
    await stack.scale(scheduler=2, worker=1)


async def ask_anew(client: AsyncOpenAI, seed: int, is_over: asyncio.Event) -> None:
    """One prompt after another, of ids that no cache has."""
    random = Random(seed)
    while not is_over.is_set():
        prompt = [random.randrange(300, 8000) for _ in range(200)]
        await client.completions.create(model="shoal-tiny", prompt=prompt, max_tokens=250)


async def test_killed_services_come_back_and_only_clients_of_a_gateway_notice(stack: Stack):
    nums = {"gateway": 1, "tokenizer": 2, "scheduler": 2, "worker": 2}
    await stack.scale(**nums)
    async with loaded(stack.url) as load:
        for service in ("tokenizer", "scheduler", "worker"):
            await progress(load)
            victim, *_ = await stack.containers(service)
            await stack.kill(victim)
            await stack.until_restarted(victim)
            await stack.until_ready(service, nums[service])
            await progress(load)
    (gateway,) = await stack.containers("gateway")
    await stack.kill(gateway)
    await stack.until_restarted(gateway)
    await stack.until_ready("gateway", 1)
    async with loaded(stack.url):
        pass


async def test_prometheus_finds_every_replica_and_answers_every_query_of_the_board(stack: Stack):
    await stack.scale(worker=2)
    await stack.compose("up", "-d", "--no-build", "prometheus")
    async with loaded(stack.url), aiohttp.ClientSession() as session:
        unanswered = set(queries())
        async with asyncio.timeout(90):
            while unanswered:
                await asyncio.sleep(2)
                unanswered = {each for each in unanswered if not await ask(stack, session, each)}
        workers = await ask(stack, session, 'up{job="worker"} == 1')
        assert len(workers) == 2
        rules = (await api(stack, session, "rules"))["groups"][0]["rules"]
        assert [rule["lastError"] for rule in rules if "lastError" in rule] == []
        firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
        assert not firing & {"NoWorker", "StepStuck", "BlockLeak", "KvCacheAlmostFull"}
    await stack.compose("rm", "--stop", "--force", "prometheus")
    await stack.scale(tokenizer=1, worker=1)


async def test_each_service_is_replaced_under_load_without_a_failed_request(stack: Stack):
    async with loaded(stack.url, LONG_STREAM) as load:
        for service in ("gateway", "tokenizer", "scheduler", "worker"):
            old = await stack.begin_replacement(service)
            stopped_s = time.monotonic()
            await stack.end_replacement(old)
            new = await stack.containers(service)
            assert len(new) == len(old)
            assert not set(new) & set(old)
            await progress(load)
            caught = [
                each for each in load.times_s if len(each) > 1 and each[1] < stopped_s < each[-1]
            ]
            assert caught, "no stream was open when the old one was stopped"
        there = await stack.compose("ps", "-q")
    await stack.compose("up", "-d", "--no-build", "--wait")
    assert await stack.compose("ps", "-q") == there, "no container is replaced"


@pytest.mark.parametrize(
    "check",
    [
        ("check", "config", "/etc/prometheus/prometheus.yml"),
        ("check", "rules", "/rules/rules.yml"),
        ("test", "rules", "/rules/rules_test.yml"),
    ],
)
async def test_promtool_finds_nothing_wrong(stack: Stack, check: tuple[str, ...]):
    rules = ("-v", f"{ROOT}/compose/prometheus:/rules:ro")
    image = ("--entrypoint", "promtool", "shoal-prometheus:test")
    assert "SUCCESS" in await stack.docker("run", "--rm", *rules, *image, *check)


async def ask(stack: Stack, session: aiohttp.ClientSession, query: str) -> list[Any]:
    """The current series in Prometheus, except those without a value."""
    found = (await api(stack, session, "query", query=query))["result"]
    return [series for series in found if series["value"][1] != "NaN"]


async def api(stack: Stack, session: aiohttp.ClientSession, path: str, **params: str) -> Any:
    url = f"http://127.0.0.1:{stack.prometheus_port}/api/v1/{path}"
    try:
        async with session.get(url, params=params) as response:
            body = await response.json()
    except aiohttp.ClientConnectionError:
        return {"result": []}  # not there yet
    assert body["status"] == "success", body
    return body["data"]


async def test_only_the_edge_is_reached_from_outside(stack: Stack):
    published = await stack.docker(
        *("ps", "--format", "{{.Names}} {{.Ports}}"),
        *("--filter", f"label=com.docker.compose.project={stack.name}"),
    )
    assert {line.split()[0] for line in published.splitlines() if "->" in line} == {
        f"{stack.name}-edge-1"
    }
    ports = (("gateway", 8000), ("tokenizer", 5570), ("scheduler", 5571), ("scheduler", 9100),
             ("worker", 9100))  # fmt: skip
    inside = [(await address_of(stack, service), port) for service, port in ports]
    assert await connected(stack, "mesh", inside) == inside, "they listen"
    assert await connected(stack, "outside", inside) == []
    assert await connected(stack, "mesh", [("1.1.1.1", 53)]) == [], "no service inside gets out"


async def address_of(stack: Stack, service: str) -> str:
    container, *_ = await stack.containers(service)
    form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    return (await stack.docker("inspect", "-f", form, container)).strip()


async def connected(
    stack: Stack, network: str, addresses: list[tuple[str, int]]
) -> list[tuple[str, int]]:
    """The ``addresses`` reachable from a container of ``network``."""
    script = f"""
import socket
from concurrent.futures import ThreadPoolExecutor

def answer(address):
    try:
        socket.create_connection(address, 2)
    except OSError:
        return 'no'
    return 'yes'

print(*ThreadPoolExecutor().map(answer, {addresses}))
"""
    answers = await stack.docker(
        *("run", "--rm", "--network", f"{stack.name}_{network}", "--entrypoint", "python"),
        *("shoal-scheduler:test", "-c", script),
    )
    each_answer = zip(addresses, answers.split(), strict=True)
    return [address for address, answer in each_answer if answer == "yes"]


@pytest.mark.parametrize("secret", [None, "gateway"])
async def test_a_service_without_a_key_of_its_role_connects_to_no_peer(
    stack: Stack, secret: str | None
):
    """An impostor worker on the mesh's own network."""
    scheduler, *_ = await stack.containers("scheduler")
    before = await stack.metrics(scheduler)
    volumes = [f"--volume={stack.name}_keys-public:/keys/public:ro"]
    script = "exec shoal worker --insecure-tcp"
    if secret is not None:
        volumes.append(f"--volume={stack.name}_keys-{secret}:/stolen:ro")
        script = (
            "mkdir -p /tmp/keys/worker && cp -r /keys/public /tmp/keys/public"
            f" && cp /stolen/{secret}.secret /tmp/keys/worker/worker.secret"
            f" && cp /keys/public/{secret}.key /tmp/keys/public/worker.key"
            " && exec shoal worker --keys /tmp/keys"
        )
    intruder = await stack.docker(
        *("run", "-d", "--network", f"{stack.name}_mesh", *volumes, "--entrypoint", "sh"),
        *("-e", "SHOAL_SCHEDULER_ADDRESS=tcp://scheduler", "-e", "SHOAL_MODEL=/model"),
        *("-v", f"{ROOT}/models/shoal-tiny:/model:ro", "shoal-worker-cpu:test", "-c", script),
    )
    try:
        async with asyncio.timeout(60):
            while True:
                now = await stack.metrics(scheduler)
                if now["shoal_peers_refused_total"] > before["shoal_peers_refused_total"]:
                    break
                await asyncio.sleep(0.3)
        assert (await stack.status(intruder.strip()))["reason"] == "no scheduler is connected"
        assert now['shoal_peers{service="worker"}'] == 1, "the one that belongs there"
    finally:
        await stack.docker("rm", "-f", intruder.strip())


async def test_the_images_hold_only_the_necessary_files(stack: Stack):
    for service in ("gateway", "tokenizer", "scheduler"):
        container, *_ = await stack.containers(service)
        assert await stack.docker("exec", container, "id", "-u") == "10001\n"
        with pytest.raises(CommandError, match=r"No module named .*torch"):
            await stack.docker("exec", container, "python", "-c", "import torch")
        with pytest.raises(CommandError, match="Read-only file system"):
            await stack.docker("exec", container, "touch", "/app/x")


async def test_a_file_adds_adapters(stack: Stack, tmp_path: Path):
    tmp_path.chmod(0o755)
    adapter = tmp_path / "adapters" / "empty"
    adapter.mkdir(parents=True)
    files: dict[str, list[str]] = {"gateway": ["compose/adapters.yml"], "worker": []}
    async with (
        stack.extended(files, {"SHOAL_ADAPTERS": str(adapter.parent)}),
        aiohttp.ClientSession(f"http://127.0.0.1:{stack.port}") as session,
    ):
        await stack.until_ready("gateway", 1)
        order = {"lora_name": "empty"}
        async with session.post("/v1/load_lora_adapter", json=order) as response:
            error = (await response.json())["error"]
    assert error["message"] == "the folder has no adapter_config.json"


async def test_a_file_adds_stores_of_kv_blocks(stack: Stack):
    """A recreated worker loads the blocks of its predecessor."""
    files: dict[str, list[str]] = {"scheduler": ["compose/kv-store.yml"], "worker": []}
    asked: Any = {"model": "shoal-tiny", "prompt": [*range(300, 500)], "max_tokens": 2}
    settings = {
        "SHOAL_KV_OFFLOADING_SIZE": "0.1",
        "SHOAL_KV_DISK_SIZE": "0.1",
        "KV_STORES_SIZE": "256m",
    }
    async with (
        stack.extended(files, settings),
        AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client,
    ):
        for is_recreated in (False, True):
            await stack.until_ready("worker", 1)
            answer: Any = await client.completions.create(**asked)
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert (cached > 150) == is_recreated
            if not is_recreated:
                await saved(stack)
                await stack.compose(*REPLACE_WORKER)
        (worker,) = await stack.containers("worker")
        metrics = await stack.metrics(worker)
        up = [value for name, value in metrics.items() if name.startswith("shoal_kv_store_up")]
        assert up == [1, 1]  # in memory, and on the disk
    await stack.docker("volume", "rm", f"{stack.name}_kv", f"{stack.name}_kv-disk")


async def saved(stack: Stack) -> None:
    """Waits until the worker has saved blocks."""
    (worker,) = await stack.containers("worker")
    async with asyncio.timeout(30):
        while not (await stack.metrics(worker)).get(SAVED):
            await asyncio.sleep(0.2)


async def test_more_files_add_keys_https_and_a_store(stack: Stack, tmp_path: Path):
    keys, certificate = tmp_path / "keys", tmp_path / "certificate.pem"
    keys.write_text("a-key-of-a-client\n")
    make_certificate(certificate)
    files = {
        "gateway": ["compose/api-keys.yml", "compose/store.yml"],
        "edge": ["compose/tls.yml"],
    }
    settings = {"SHOAL_API_KEYS": str(keys), "SHOAL_CERTIFICATE": str(certificate)}
    trusting = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=certificate))
    async with (
        stack.extended(files, settings),
        aiohttp.ClientSession(f"https://127.0.0.1:{stack.port}", connector=trusting) as session,
    ):
        await stack.until_ready("gateway", 1)
        for key, status in (("wrong", 401), ("a-key-of-a-client", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            async with session.get("/v1/models", headers=headers) as response:
                assert response.status == status
        async with session.get("/ready") as response:
            assert response.status == 200
        asked = {"model": "shoal-tiny", "input": "Hello", "max_output_tokens": 4}
        async with session.post("/v1/responses", json=asked, headers=headers) as response:
            kept = (await response.json())["id"]
        async with session.get(f"/v1/responses/{kept}", headers=headers) as response:
            assert response.status == 200, await response.text()
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b'{"custom_id": "1"}', filename="batch.jsonl")
        async with session.post("/v1/files", data=form, headers=headers) as response:
            assert response.status == 200, await response.text()
    await stack.docker("volume", "rm", f"{stack.name}_store")
