"""Adapters through real processes: each text is the one of its merged checkpoint, also after kills,
reloads and unloads."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.harness import scheduled
from benchmarks.harness.checked_load import stream
from benchmarks.harness.engines import make_engine
from benchmarks.harness.fleet import Fleet, running_fleet
from services.worker.adapters.sites import LowRank
from shared.model_folder import EMBEDDED_MODEL, TOKENIZER_FILE
from shared.wire.messages import SamplingParams
from tests.mesh.forks import fork
from tests.services.worker.adapters.adapter_folders import random_layers, write_adapter

BASE = "shoal-tiny"
NAMES = ("sql", "poems", "tickets")
SETTINGS = {
    "DTYPE": "float32",
    "MAX_MODEL_LEN": "512",
    "SERVED_MODEL_NAME": BASE,
    "DRAIN_TIMEOUT_S": "10",
    "ALLOW_RUNTIME_LORA_UPDATING": "true",
}
SYSTEM = "You are the assistant of a fish shop. Answer in one sentence, and be kind. " * 2
QUESTIONS = ("Which fish is blue?", "def price(fish):")
RANKS = {"sql": 8, "poems": 4, "tickets": 16}
SIZE = 0.1  # of the elements of A and B

Adapter = dict[str, LowRank]


def make_adapter(number: int, rank: int) -> Adapter:
    shapes = {
        name.removesuffix(".weight"): (len(tensor), tensor.shape[1])
        for file in sorted(EMBEDDED_MODEL.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if name.startswith("model.layers.") and name.endswith("_proj.weight")
    }
    return random_layers(shapes, rank, number, SIZE / rank**0.25)


def save_merged(adapter: Adapter, folder: Path) -> Path:
    """A copy of the embedded model with the adapter in its weights, in float32."""
    shutil.copytree(EMBEDDED_MODEL, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if change := adapter.get(name.removesuffix(".weight")):
                tensors[name] = tensor.float() + change.b @ change.a
        save_file(tensors, file)
    return folder


def body_of(model: str, number: int, max_tokens: int = 24) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": SYSTEM + QUESTIONS[number % len(QUESTIONS)],
        "max_tokens": max_tokens,
        "temperature": 0.8 if number % 2 else 0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@asynccontextmanager
async def session_of() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    async with session_of() as session, session.post(f"{url}{path}", json=body) as response:
        return response.status, await response.text()


async def models_of(url: str) -> dict[str, dict[str, Any]]:
    async with session_of() as session, session.get(f"{url}/v1/models") as response:
        return {each["id"]: each for each in (await response.json())["data"]}


async def texts_of(url: str, bodies: list[dict[str, Any]]) -> list[str]:
    async with session_of() as session:
        return await asyncio.gather(*(stream(session, url, body) for body in bodies))


async def num_cached(url: str, body: dict[str, Any]) -> int:
    plain = {name: value for name, value in body.items() if not name.startswith("stream")}
    path = f"{url}/v1/completions"
    async with session_of() as session, session.post(path, json=plain) as response:
        usage = (await response.json())["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def progress(fleet: Fleet, num_steps: int) -> None:
    """Waits until each worker has computed further steps."""
    before = {each.instance: (await each.status())["num_steps"] for each in fleet.of("worker")}
    async with asyncio.timeout(60):
        for worker in fleet.of("worker"):
            while (await worker.status())["num_steps"] < before[worker.instance] + num_steps:
                await asyncio.sleep(0.01)


def merged_texts(folder: Path, bodies: list[dict[str, Any]]) -> list[str]:
    """The texts of a checkpoint by an engine alone."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / TOKENIZER_FILE))
    names = "seed", "temperature", "max_tokens", "ignore_eos"
    params = [SamplingParams(**{name: body[name] for name in names}) for body in bodies]
    prompts = [tokenizer.encode(body["prompt"]).ids for body in bodies]
    found = scheduled.run(make_engine(folder, "native", max_model_len=512), prompts, params)
    return [tokenizer.decode(ids) for ids in found.texts]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_each_text_is_that_of_its_merged_checkpoint(tmp_path: Path) -> None:
    adapters = {name: make_adapter(number, RANKS[name]) for number, name in enumerate(NAMES)}
    folders = {name: save_merged(adapters[name], tmp_path / f"merged-{name}") for name in NAMES}
    folders[BASE] = EMBEDDED_MODEL
    bodies = {name: [body_of(name, 0), body_of(name, 1)] for name in folders}
    long = body_of("sql", 2, max_tokens=240)  # it outlasts the load of an adapter
    expected = {}
    for name, folder in folders.items():
        wanted = [*bodies[name], *([long] if name == "sql" else [])]
        expected[name] = merged_texts(folder, wanted)
    assert len({texts[0] for texts in expected.values()}) == len(folders)
    assert len({texts[1] for texts in expected.values()}) == len(folders)

    directory, mesh = tmp_path / "adapters", tmp_path / "mesh"
    mesh.mkdir()
    for name, adapter in adapters.items():
        if name != "tickets":
            write_adapter(directory / name, adapter)
    settings = SETTINGS | {"MODEL": str(EMBEDDED_MODEL), "LORA_DIR": str(directory)}
    async with running_fleet(mesh, settings, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=2, tokenizer=1, gateway=1)
        url = fleet.of("gateway")[0].url
        assert {*await models_of(url)} == {BASE, "sql", "poems"}
        status, text = await post(url, "/v1/completions", body_of("tickets", 0))
        assert (status, "model_not_found" in text) == (404, True), text
        write_adapter(directory / "tickets", adapters["tickets"])
        status, text = await post(url, "/v1/load_lora_adapter", {"lora_name": "tickets"})
        assert (status, text) == (200, "Success: LoRA adapter 'tickets' added successfully.")
        listed = await models_of(url)
        assert {*listed} == {BASE, *NAMES}
        assert listed["tickets"]["parent"] == BASE
        assert listed["tickets"]["root"] == "tickets"

        # In a crowd, while one of two workers dies.
        crowd = [body for name in folders for body in bodies[name]]
        running = asyncio.create_task(texts_of(url, crowd))
        await progress(fleet, 4)
        await fleet.kill(fleet.of("worker")[0])
        assert await running == [text for name in folders for text in expected[name][:2]]

        # Only equal adapters share a prefix.
        await fleet.start("worker")
        await fleet.until_ready()
        unseen = [body | {"prompt": "Unseen. " + body["prompt"]} for body in crowd[::2]]
        assert [await num_cached(url, body) for body in unseen] == [0] * len(unseen)
        again = await asyncio.gather(*(num_cached(url, body) for body in unseen for _ in range(4)))
        assert max(again) > 0

        # A running text keeps its adapter when its name gets another one.
        running = asyncio.create_task(texts_of(url, [long]))
        await progress_of_any(fleet, 2)
        write_adapter(directory / "sql", adapters["poems"])
        order = {"lora_name": "sql", "lora_path": "sql"}
        status, text = await post(url, "/v1/load_lora_adapter", order)
        assert (status, "already" in text) == (400, True), text
        status, text = await post(url, "/v1/load_lora_adapter", order | {"load_inplace": True})
        assert status == 200, text
        assert not running.done()
        renamed = [body | {"model": "sql"} for body in bodies["poems"]]
        assert await texts_of(url, renamed) == expected["poems"]
        assert await running == [expected["sql"][2]]

        # A running text ends with an adapter that is unloaded.
        running = asyncio.create_task(texts_of(url, [long | {"model": "poems"}]))
        alone = await texts_of(url, [long | {"model": "sql"}])  # the same bytes by now
        await fleet.until_idle()
        assert await running == alone
        running = asyncio.create_task(texts_of(url, [long | {"model": "poems"}]))
        await progress_of_any(fleet, 2)
        status, text = await post(url, "/v1/unload_lora_adapter", {"lora_name": "poems"})
        assert (status, text) == (200, "Success: LoRA adapter 'poems' removed successfully.")
        assert not running.done()
        status, text = await post(url, "/v1/completions", body_of("poems", 0))
        assert status == 404, text
        assert await running == alone
        assert {*await models_of(url)} == {BASE, "sql", "tickets"}
        await fleet.until_idle()


async def progress_of_any(fleet: Fleet, num_steps: int) -> None:
    async def steps() -> int:
        return sum([(await each.status())["num_steps"] for each in fleet.of("worker")])

    goal = await steps() + num_steps
    async with asyncio.timeout(60):
        while await steps() < goal:
            await asyncio.sleep(0.01)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "worker", ["", pytest.param("tests.mesh.device_worker", marks=pytest.mark.slow)]
)
async def test_an_adapter_comes_and_goes_while_a_text_of_another_runs(
    tmp_path: Path, worker: str
) -> None:
    """With the engine of CPUs, and with the one for GPUs on a CPU."""
    if worker:
        pytest.importorskip(worker)
    made = {name: make_adapter(number, RANKS[name]) for number, name in enumerate(NAMES[:2])}
    expected = {BASE: merged_texts(EMBEDDED_MODEL, [body_of(BASE, 0)])}
    for name, adapter in made.items():
        folder = save_merged(adapter, tmp_path / f"merged-{name}")
        expected[name] = merged_texts(folder, [body_of(name, 0)])
    first, second = made
    directory, mesh = tmp_path / "adapters", tmp_path / "mesh"
    mesh.mkdir()
    write_adapter(directory / first, made[first])
    settings = SETTINGS | {"MODEL": str(EMBEDDED_MODEL), "LORA_DIR": str(directory)}
    settings |= {"MAX_NUM_SEQS": "4", "MAX_LORA_RANK": "16", "CUDAGRAPH_CAPTURE_SIZES": "4"}
    async with running_fleet(mesh, settings, fork) as fleet:
        await fleet.start("worker", module=worker)
        await fleet.start_all(scheduler=1, tokenizer=1, gateway=1)
        url = fleet.of("gateway")[0].url
        running = asyncio.create_task(texts_of(url, [body_of(first, 0), body_of(BASE, 0)]))
        write_adapter(directory / second, made[second])
        status, text = await post(url, "/v1/load_lora_adapter", {"lora_name": second})
        assert status == 200, text
        assert await running == expected[first] + expected[BASE]
        crowd = [body_of(name, 0) for name in expected]
        assert await texts_of(url, crowd) == [text for each in expected.values() for text in each]
        status, text = await post(url, "/v1/unload_lora_adapter", {"lora_name": second})
        assert status == 200, text
        status, text = await post(url, "/v1/completions", body_of(second, 0))
        assert status == 404, text
