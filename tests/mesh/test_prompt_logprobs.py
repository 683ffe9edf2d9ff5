"""Prompt logprobs through the whole mesh: each is sent once, through kills and slow clients."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from benchmarks.harness.fleet import Fleet, running_fleet
from services.gateway.mesh import open_prompt
from services.scheduler.sequence import Arrival, scored_token_bytes
from shared.wire.messages import Capacity
from tests.mesh.fake_engine import made_up_logprobs
from tests.mesh.forks import fork
from tests.mesh.mesh import Mesh, running_mesh

VOCAB_SIZE = 8192
CAPACITY = Capacity(256, 16, 8, 16, 2048, VOCAB_SIZE)
PROMPT = [300 + number * 7 % 5000 for number in range(400)]
NARROW_BYTES = 256 << 10
TOLERANCE = 1e-3  # of logprobs in float32


async def ask(url: str, **body: Any) -> Any:
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        return await response.json()


def check_list(found: list[Any], prompt: list[int], num_top: int) -> None:
    """FakeEngine's logprobs."""
    assert found[0] is None
    assert len(found) == len(prompt)
    for index, (token, entries) in enumerate(zip(prompt[1:], found[1:], strict=True), 1):
        truth = made_up_logprobs(index - len(prompt), VOCAB_SIZE)
        likeliest = np.argsort(-truth, kind="stable")[:num_top].tolist()
        assert list(entries) == list(dict.fromkeys(map(str, [token, *likeliest])))
        assert [np.float32(each["logprob"]) for each in entries.values()] == [
            truth[int(key)] for key in entries
        ]


async def test_prompt_logprobs_fill_the_prefix_cache_but_do_not_read_it(tmp_path: Path):
    async with running_mesh(tmp_path, CAPACITY, 0) as mesh:
        for num_prompt_scored in (0, 1):
            reply = await ask(
                mesh.url(), prompt=PROMPT, prompt_logprobs=1, max_tokens=num_prompt_scored
            )
            check_list(reply["choices"][0]["prompt_logprobs"], PROMPT, 1)
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        reply = await ask(mesh.url(), prompt=PROMPT, max_tokens=0)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 384
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == 0
        await mesh.until_idle()


def whole_vocabulary(prompt: list[int]) -> dict[str, Any]:
    return {
        "prompt": prompt, "echo": True, "logprobs": -1, "stream": True, "max_tokens": 0,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip


def narrow_windows(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little data already exceeds a window."""
    add = mesh.core.add

    def add_with_less(arrival: Arrival) -> None:
        add(arrival)
        for new in arrival.generate.sequences:
            key = new.request, arrival.generate.attempt
            mesh.core.sequences[key].max_bytes = NARROW_BYTES

    monkeypatch.setattr(mesh.core, "add", add_with_less)
    monkeypatch.setattr(open_prompt, "WINDOW_BYTES", NARROW_BYTES)


async def test_more_than_a_window_streams_to_a_reading_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prompt = PROMPT[:40]
    tops: list[dict[str, float]] = []
    assert len(prompt) * VOCAB_SIZE * 4 > 4 * NARROW_BYTES
    async with (
        running_mesh(tmp_path, CAPACITY, 0) as mesh,
        aiohttp.ClientSession(mesh.url()) as session,
    ):
        narrow_windows(mesh, monkeypatch)
        body = whole_vocabulary(prompt)
        async with session.post("/v1/completions", json=body) as response:
            events = (await response.text()).splitlines()
        await mesh.until_idle()
    for event in events:
        if event.startswith("data: {"):
            [choice] = json.loads(event[6:])["choices"]
            tops += choice["logprobs"]["top_logprobs"] if choice["logprobs"] else []
    assert tops[0] is None
    assert len(tops) == len(prompt)
    for index, top in enumerate(tops[1:], 1):
        truth = made_up_logprobs(index - len(prompt), VOCAB_SIZE)
        order = np.argsort(-truth, kind="stable").tolist()
        assert [int(name[9:]) for name in top] == order


async def test_a_client_that_does_not_read_its_prompt_logprobs_holds_up_no_other(tmp_path: Path):
    async with (
        running_mesh(tmp_path, CAPACITY, 0) as mesh,
        aiohttp.ClientSession(mesh.url()) as session,
        session.post("/v1/completions", json=whole_vocabulary(PROMPT * 4)) as response,
    ):
        assert response.status == 200
        await mesh.until(lambda: not all(each.has_credit for each in mesh.core.sequences.values()))
        [sequence] = mesh.core.sequences.values()
        reply = await ask(mesh.url(), prompt=PROMPT, prompt_logprobs=0, max_tokens=2)
        check_list(reply["choices"][0]["prompt_logprobs"], PROMPT, 0)
        per_token = scored_token_bytes(sequence.params, VOCAB_SIZE)
        assert sequence.num_bytes < sequence.max_bytes + per_token
        assert sequence.num_prompt_scored < len(sequence.prompt) - 1
        response.close()
        await mesh.until_idle()


SETTINGS = {
    "DTYPE": "float32", "MAX_MODEL_LEN": "2048",
    "MAX_NUM_BATCHED_TOKENS": "16",
}  # fmt: skip


async def kill_in_the_prompt(fleet: Fleet) -> None:
    """Kills the worker in the middle of a prompt; another one comes."""
    [worker], num_before = fleet.of("worker"), -1.0
    async with asyncio.timeout(30):
        while (num := (await worker.metrics())["shoal_steps_total"]) < num_before + 5:
            num_before = num if num_before < 0 else num_before
            await asyncio.sleep(0.02)
    await fleet.kill(worker)
    await fleet.start("worker")


@pytest.mark.slow
async def test_a_text_scored_as_a_prompt_has_the_logprobs_it_was_written_with(tmp_path: Path):
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        url = fleet.of("gateway")[0].url
        text = "class Queue:\n    def put(self, item):\n        " * 25
        sampling = {"max_tokens": 24, "temperature": 0.7, "seed": 5, "return_token_ids": True}
        asking, _ = await asyncio.gather(
            ask(url, prompt=text, echo=True, logprobs=3, **sampling), kill_in_the_prompt(fleet)
        )
        [written] = asking["choices"]
        assert written["text"].startswith(text)
        ids = written["prompt_token_ids"] + written["token_ids"]
        scored = await ask(url, prompt=ids, echo=True, logprobs=3, max_tokens=0)
        [listed] = (await ask(url, prompt=ids, prompt_logprobs=0, max_tokens=0))["choices"]
        await fleet.until_idle()
    [score] = scored["choices"]
    assert scored["usage"]["completion_tokens"] == 0
    assert score["logprobs"]["tokens"] == written["logprobs"]["tokens"]
    assert score["logprobs"]["text_offset"] == written["logprobs"]["text_offset"]
    values = [each["logprobs"]["token_logprobs"] for each in (written, score)]
    values.append([each and next(iter(each.values()))["logprob"] for each in
                   listed["prompt_logprobs"]])  # fmt: skip
    assert all(each[0] is None for each in values)
    assert len(values[0]) == len(ids)
    first, *others = (np.array(each[1:]) for each in values)
    assert all(np.abs(first - each).max() < TOLERANCE for each in others)
