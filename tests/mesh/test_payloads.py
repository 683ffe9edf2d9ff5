"""Logprobs of the whole vocabulary, through real processes: exact, and no burden to others."""

import asyncio
import json
import shutil
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness.checked_load import body_of, stream
from benchmarks.harness.fleet import Fleet, Member, running_fleet
from shared.model_folder import EMBEDDED_MODEL
from tests.mesh.forks import fork

SETTINGS = {"DTYPE": "float32", "MAX_MODEL_LEN": "512", "MAX_LOGPROBS": "-1"}
LARGE_VOCABULARY = 151_936
NUM_CLIENTS, NUM_TOKENS = 34, 2
FASTDEPLOY_BYTES = 802_840  # the largest message of the queue that this mesh replaces
MAX_GROWTH_BYTES = 256 << 20  # 110 MB were seen, and 1.8 GB without credit


async def started(directory: Path, records: Path, model: Path, fleet: Fleet) -> str:
    records.mkdir()
    await fleet.start("scheduler")
    await fleet.start("tokenizer", MODEL=str(model))
    await fleet.start(
        "worker", "tests.mesh.recording_worker", MODEL=str(model), TEST_RECORDS=str(records)
    )
    gateway = await fleet.start("gateway")
    await fleet.until_ready()
    return gateway.url


def whole_vocabulary(number: int, max_tokens: int) -> dict:
    return body_of(number, max_tokens) | {
        "max_tokens": max_tokens,
        "logprobs": -1,
        "return_tokens_as_token_ids": True,
    }


async def logprobs_of(session: aiohttp.ClientSession, url: str, body: dict) -> list[np.ndarray]:
    """The client's logprobs of each token: [vocab_size] float32, in order of ids."""
    rows = []
    headers = {"X-Request-Id": f"r{body['seed']}"}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        buffer = b""
        async for chunk in response.content.iter_any():
            buffer += chunk
            *events, buffer = buffer.split(b"\n\n")
            for event in events:
                if event.startswith(b"data: "):
                    rows += _rows(event.removeprefix(b"data: "))
    return rows


def _rows(data: bytes) -> list[np.ndarray]:
    if data == b"[DONE]":
        return []
    choices = json.loads(data)["choices"]
    tops = [top for each in choices if each["logprobs"] for top in each["logprobs"]["top_logprobs"]]
    rows = []
    for top in tops:
        row = np.empty(len(top), np.float32)
        for name, value in top.items():
            row[int(name.removeprefix("token_id:"))] = value
        rows.append(row)
    return rows


def recorded(records: Path, number: int) -> list[np.ndarray]:
    """The worker's results of the same request, without each token's own logprob."""
    rows = []
    for path in sorted(records.glob("*.npz")):
        with np.load(path) as step:
            names = [name for name in step if name.startswith(f"r{number}~")]
            rows += [values[1:] for name in names for values in step[name]]
    return rows


def largest_step_bytes(records: Path) -> int:
    sizes = []
    for path in records.glob("*.npz"):
        with np.load(path) as step:
            sizes.append(sum(step[name].nbytes for name in step))
    return max(sizes)


async def test_a_step_too_large_for_fastdeploys_queue_arrives_as_the_worker_computed_it(
    tmp_path: Path,
):
    records = tmp_path / "records"
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        url = await started(tmp_path, records, EMBEDDED_MODEL, fleet)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            (records / "hold").touch()
            bodies = [whole_vocabulary(number, NUM_TOKENS) for number in range(NUM_CLIENTS)]
            asked = asyncio.gather(*(logprobs_of(session, url, body) for body in bodies))
            (scheduler,) = fleet.of("scheduler")
            async with asyncio.timeout(60):
                while (await scheduler.metrics())["shoal_sequences"] < NUM_CLIENTS:
                    await asyncio.sleep(0.05)
            (records / "hold").unlink()  # now nearly all share a step
            replies = await asked
        await fleet.until_idle()
    for number, rows in enumerate(replies):
        expected = recorded(records, number)
        assert len(rows) == len(expected) == NUM_TOKENS
        assert all(np.array_equal(*pair) for pair in zip(rows, expected, strict=True))
    assert largest_step_bytes(records) > FASTDEPLOY_BYTES


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with Qwen's vocabulary size, and the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("large")
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=LARGE_VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, folder / name)
    return folder


@pytest.mark.slow
async def test_a_large_vocabulary_arrives_too(tmp_path: Path, large_model: Path):
    records = tmp_path / "records"
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        url = await started(tmp_path, records, large_model, fleet)
        async with aiohttp.ClientSession() as session:
            bodies = [whole_vocabulary(number, 2) for number in range(2)]
            replies = await asyncio.gather(*(logprobs_of(session, url, body) for body in bodies))
        await fleet.until_idle()
    for number, rows in enumerate(replies):
        expected = recorded(records, number)
        assert len(rows) == len(expected) == 2
        assert all(np.array_equal(*pair) for pair in zip(rows, expected, strict=True))


@pytest.mark.slow
async def test_clients_that_do_not_read_bound_memory_and_slow_no_other(
    tmp_path: Path, large_model: Path
):
    settings = {**SETTINGS, "MAX_NUM_SEQS": "4"}
    async with running_fleet(tmp_path, settings) as fleet:
        url = await started(tmp_path, tmp_path / "records", large_model, fleet)
        front = [member for member in fleet.members if member.kind != "worker"]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await stream(session, url, body_of(0, 8))
            await logprobs_of(session, url, whole_vocabulary(1, 2))
            before = sizes(front)
            unread = [
                await session.post(f"{url}/v1/completions", json=whole_vocabulary(number, 300))
                for number in range(8)
            ]
            for number in range(12):
                await stream(session, url, body_of(number, 32))
            grown = {kind: after - before[kind] for kind, after in sizes(front).items()}
            for response in unread:
                response.close()
        await fleet.until_idle()
    assert all(growth < MAX_GROWTH_BYTES for growth in grown.values()), grown


def sizes(members: list[Member]) -> dict[str, int]:
    return {member.kind: member.resident_bytes for member in members}
