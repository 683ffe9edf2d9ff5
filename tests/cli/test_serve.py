"""The whole mesh as processes: started, used, killed, started again, drained."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import aiohttp
import openai
import pytest
from httpx2 import HTTPError
from openai import AsyncOpenAI

from cli.doctor.facts import serves
from cli.exit_codes import WRONG
from cli.serve import main
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.serve import ServeConfig
from tests.cli.serving import Serving, is_alive, serving
from tests.shared.hub_cache import add_model

SERVICES = {"gateway", "tokenizer", "scheduler", "worker"}


def client_of(serving: Serving) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=60)


async def stream_text(client: AsyncOpenAI, num: int, started: asyncio.Event | None = None) -> int:
    """Runs one stream to its end; the number of finish reasons seen."""
    num_ends = 0
    stream = await client.completions.create(
        model="shoal-tiny",
        prompt="import os\n",
        max_tokens=num,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if started is not None:
            started.set()
        num_ends += chunk.choices[0].finish_reason is not None
    return num_ends


async def all_blocks_are_free(serving: Serving) -> None:
    """Waits until the scheduler has no sequence and no used block; times out otherwise."""
    async with asyncio.timeout(10):
        while True:
            metrics = await serving.metrics("scheduler")
            if not metrics["shoal_sequences"] and not metrics['shoal_kv_blocks{state="used"}']:
                return
            await asyncio.sleep(0.02)


async def test_each_service_is_killed_and_the_mesh_serves_drains_and_leaves_nothing(
    tmp_path: Path,
):
    mesh = tmp_path / "mesh"
    async with serving(mesh) as shoal:
        await shoal.until_ready()
        assert await asyncio.to_thread(serves, ServeConfig(port=shoal.port))
        async with client_of(shoal) as client:
            for service in ("worker", "tokenizer", "scheduler", "gateway"):
                await kill_under_streams(shoal, client, service)
            started = asyncio.Event()
            open_stream = asyncio.create_task(stream_text(client, 200, started))
            await started.wait()
            pids = shoal.children()
            assert set(pids) == SERVICES
            shoal.process.send_signal(signal.SIGINT)
            assert await open_stream == 1, "a drain finishes open streams"
        assert await shoal.process.wait() == 0
        assert any("requests of 2,048 tokens at once" in line for line in shoal.lines)
        assert not any(is_alive(pid) for pid in pids.values())
        assert list(mesh.iterdir()) == []


async def kill_under_streams(shoal: Serving, client: AsyncOpenAI, service: str) -> None:
    started = asyncio.Event()
    streams = [asyncio.create_task(stream_text(client, 200, started)) for _ in range(2)]
    await started.wait()
    before = shoal.children()
    os.kill(before[service], signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 90)
    ends = [result for result in results if result == 1]
    errors = [each for each in results if isinstance(each, openai.APIError | HTTPError)]
    assert len(ends) + len(errors) == len(streams), (service, results)
    assert not (service != "gateway" and errors), f"requests of a lost {service} are resumed"
    assert not (service == "gateway" and ends), "this stream was not open any more"
    async with asyncio.timeout(60):
        while shoal.children().get(service) in (None, before[service]):
            await asyncio.sleep(0.1)
    await shoal.until_ready()
    await all_blocks_are_free(shoal)
    assert await stream_text(client, 8) == 1
    after = shoal.children()
    assert {kind for kind in SERVICES if after[kind] != before[kind]} == {service}


async def test_after_a_kill_of_the_supervisor_nothing_lives_and_the_next_start_sweeps(
    tmp_path: Path,
):
    """A service of the next start refuses a setting, which is the end of that mesh."""
    async with serving(tmp_path) as shoal:
        await shoal.until_ready()
        pids = shoal.children()
        shoal.process.kill()
        await shoal.process.wait()
        async with asyncio.timeout(5):
            while any(is_alive(pid) for pid in pids.values()):
                await asyncio.sleep(0.05)
        assert list(tmp_path.iterdir()), "the directory of the killed one is still there"
    async with serving(tmp_path, "--max-model-len", "999999") as shoal:
        assert await asyncio.wait_for(shoal.process.wait(), 60) == WRONG
        await asyncio.sleep(0.1)
        assert all(word in shoal.lines[-1] for word in ("max-model-len", "999999", "2048"))
        assert not shoal.children()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
async def test_a_hanging_service_is_replaced_and_a_long_drain_is_ended(tmp_path: Path):
    flags = ("--liveness-timeout-s", "5", "--drain-timeout-s", "2.5")
    async with serving(tmp_path, *flags) as shoal:
        await shoal.until_ready()
        await replace_what_hangs(shoal)
        await drain_too_long(shoal)


async def replace_what_hangs(shoal: Serving) -> None:
    before = shoal.children()
    os.kill(before["scheduler"], signal.SIGSTOP)
    async with asyncio.timeout(60):
        while shoal.children().get("scheduler") in (None, before["scheduler"]):
            await asyncio.sleep(0.1)
    await shoal.until_ready()
    async with client_of(shoal) as client:
        assert await stream_text(client, 8) == 1
    assert {**shoal.children(), "scheduler": 0} == {**before, "scheduler": 0}
    assert any("scheduler 0.1: unresponsive" in line for line in shoal.lines)


async def drain_too_long(shoal: Serving) -> None:
    """Unfinished streams end with an error."""
    async with client_of(shoal) as client:
        started = asyncio.Event()
        endless = [asyncio.create_task(stream_text(client, 2000, started)) for _ in range(8)]
        await started.wait()
        shoal.process.send_signal(signal.SIGINT)
        for stream in endless:
            with pytest.raises(openai.APIError, match="the server stops"):
                await stream
    assert await asyncio.wait_for(shoal.process.wait(), 60) == 0
    assert any("open requests end now" in line for line in shoal.lines)


@pytest.mark.slow
async def test_replicas_serve_a_model_of_the_hugging_face_cache_together_on_one_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    add_model(tmp_path / "hub", "org/name", files=EMBEDDED_MODEL.iterdir())
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    directory = tmp_path / "mesh"
    replicas = ("--gateways", "2", "--tokenizers", "2", "--schedulers", "2", "--workers", "2")
    async with serving(directory, *replicas, "--model", "org/name@main") as mesh:
        await mesh.until_ready()
        body = {"model": "org/name", "prompt": "The shoal", "max_tokens": 8, "temperature": 0}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def status() -> int:
                async with session.post(f"{mesh.url}/v1/completions", json=body) as response:
                    return response.status

            assert await asyncio.gather(*(status() for _ in range(40))) == [200] * 40
            async with session.get(f"{mesh.url}/v1/models") as response:
                models = (await response.json())["data"]
        assert [model["id"] for model in models] == ["org/name"]
        assert len(list(directory.glob("*/admin.*.sock"))) == 8


def test_a_mesh_wants_a_port_of_its_own_before_it_starts_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        in_use = f"host, port: cannot listen on 127.0.0.1:{port}: Address already in use"
        in_use += f"; try --port {int(port) ^ 1}\n"
        for flags, text in (
            (("--port", port), in_use),
            (("--port", port, "--gateways", "2"), in_use),
            (("--port", "0", "--gateways", "2"), "port: 0 takes a free port"),
            (("--host", "no.such.host.invalid"), "host, port: cannot listen on no.such.host"),
        ):
            assert main(["--mesh-dir", str(tmp_path / "mesh"), *flags]) == WRONG
            output = capsys.readouterr()
            (line,) = (output.out + output.err).splitlines()
            assert f"{line}\n".startswith(f"shoal serve: {text}")
    assert not (tmp_path / "mesh").exists()
