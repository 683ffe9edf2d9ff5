"""Outputs constrained by a schema, from the client to the engine and back, by real processes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.fleet import Fleet, running_fleet
from tests.mesh.forks import fork
from tests.mesh.structured import check, client_of, request_of, text_of, texts_of

SETTINGS = {
    "DTYPE": "float32",
    "MAX_MODEL_LEN": "512",
    "DRAIN_TIMEOUT_S": "10",
    "READY_WAIT_S": "30",  # a successor may start slowly on a busy machine
}
MTP = '{"method": "mtp", "num_speculative_tokens": 3}'
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
# Of a refused grammar; the last one is too large.
CODES = ("invalid_grammar", "grammar_too_complex", "invalid_value")
NUM_PAIRS = 24
NUM_ALL_PAIRS = 200


async def started(fleet: Fleet, **worker: str) -> str:
    """Starts one service of each kind, the worker with its own settings; the gateway's URL."""
    for kind in ("scheduler", "tokenizer", "gateway"):
        await fleet.start(kind)
    await fleet.start("worker", **worker)
    await fleet.until_ready()
    return fleet.of("gateway")[0].url


async def written(directory: Path, *asked: tuple[range, int], **worker: str) -> list[list]:
    """The outputs of each range of seeds, run concurrently, by one fleet."""
    directory.mkdir()
    async with running_fleet(directory, SETTINGS, fork) as fleet:
        async with client_of(await started(fleet, **worker)) as client:
            texts = [await texts_of(client, *each) for each in asked]
        await fleet.until_idle()
    return texts


async def hold(directory: Path, num: int) -> None:
    seeds, few = range(num), range(num // 8)
    none = '{"method": "none"}'
    (plain,) = await written(directory / "plain", (seeds, 16), SPECULATIVE_CONFIG=none)
    whole = [check(request_of(seed)[0], *text) for seed, text in zip(seeds, plain, strict=True)]
    assert sum(whole) > num // 4, "many texts come to their end"
    crowd, alone = await written(directory / "mtp", (seeds, 16), (few, 1), SPECULATIVE_CONFIG=MTP)
    assert crowd == plain
    assert alone == plain[: len(few)]
    assert await written(directory / "ngram", (seeds, 5), SPECULATIVE_CONFIG=NGRAM) == [plain]


@pytest.mark.slow
async def test_texts_are_valid_and_the_same_with_and_without_drafts_and_neighbours(tmp_path: Path):
    await hold(tmp_path, NUM_PAIRS)


@pytest.mark.slow
async def test_two_hundred_texts_are_valid_and_the_same(tmp_path: Path):
    await hold(tmp_path, NUM_ALL_PAIRS)


@pytest.mark.slow
async def test_a_text_goes_on_within_its_schema_after_kills_and_preemption(tmp_path: Path):
    """The second worker's cache is too small for all, so some are preempted."""
    seeds = range(24)
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        async with client_of(await started(fleet)) as client:
            expected = await texts_of(client, seeds, 16)
            running = asyncio.create_task(texts_of(client, seeds, 16))
            (scheduler,) = fleet.of("scheduler")
            async with asyncio.timeout(30):
                while (await scheduler.metrics())["vllm:num_requests_running"] < 10:
                    await asyncio.sleep(0.01)
            for kind, own in (("worker", {"NUM_GPU_BLOCKS_OVERRIDE": "36"}), ("tokenizer", {})):
                (victim,) = fleet.of(kind)
                await fleet.kill(victim)
                await fleet.start(kind, **own)
                await asyncio.sleep(0.5)
            assert await running == expected
        assert (await scheduler.metrics())["vllm:num_preemptions_total"] > 0
        await fleet.until_idle()


def chain_of(num: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(num)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{num}": {"type": "string"}}}


HOSTILE: dict[str, dict[str, Any]] = {
    "a chain of references": chain_of(3000),
    "five thousand optional properties": {
        "type": "object",
        "properties": {f"p{number}": {"type": "integer"} for number in range(5000)},
    },
    "a reference to itself": {"$ref": "#"},
    "an enumeration of fifty thousand": {"enum": list(range(50_000))},
}


@pytest.mark.slow
async def test_hostile_grammars_are_refused_and_a_stream_beside_them_goes_on(tmp_path: Path):
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        url = await started(fleet)
        before = {member.instance: member.process.pid for member in fleet.members}
        async with client_of(url) as client:
            request = request_of(1)[1] | {"max_tokens": 300}
            request |= {"response_format": {"type": "text"}, "extra_body": {"ignore_eos": True}}
            beside = asyncio.create_task(text_of(client, request))
            for name, schema in HOSTILE.items():
                response = await client._client.post(
                    f"{url}/v1/chat/completions",
                    json=request_of(0)[1] | {"response_format": _format(schema)},
                )
                assert response.status_code == 400, f"{name}: {response.text}"
                error = response.json()["error"]
                assert error["code"] in CODES, error
                assert error["param"].startswith("response_format"), error
            _, reason = await beside
            assert reason == "length"
        assert {member.instance: member.process.pid for member in fleet.members} == before
        await fleet.until_idle()


def _format(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
