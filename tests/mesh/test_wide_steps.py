"""The steps that stalled a queue of fixed messages: hundreds of rows, drafts and logprobs in one.

512 rows of 6 tokens with 21 logprobs each are the 802,840 bytes of the old queue's largest message;
here ten times as many logprobs travel at once.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from benchmarks import sysv
from benchmarks.cost import forget_peak, peak_bytes
from benchmarks.harness.checked_load import TIMEOUT, body_of, stream
from benchmarks.harness.fleet import Fleet, Member, running_fleet
from benchmarks.steps import wide_step
from shared.wire.token_arrays import TokenArrays
from tests.mesh.wide_worker import NUM_DRAFTS, arrays_of

NUM_ROWS, NUM_TOKENS = 512, 1 + NUM_DRAFTS
SETTINGS = {
    "MAX_NUM_SEQS": str(NUM_ROWS + 2),
    "MAX_CHOICES": str(NUM_ROWS),
    "MAX_LOGPROBS": "-1",
    "ENABLE_PREFIX_CACHING": "false",  # otherwise the other choices wait for the first one's blocks
}
SLACK_BYTES = 4 << 20  # 0.5 MB, the smaller step, grew the gateway by 3.8 MB
DEFAULT_MSGMNB = 16_384
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


async def started(folder: Path, fleet: Fleet) -> str:
    folder.mkdir()
    await fleet.start("scheduler")
    await fleet.start("tokenizer")
    await fleet.start("worker", "tests.mesh.wide_worker", TEST_STEPS=str(folder))
    gateway = await fleet.start("gateway")
    await fleet.until_ready()
    return gateway.url


def wide_body(num_logprobs: int) -> dict[str, Any]:
    """One token from the prompt's step, then a row of six."""
    return {
        "messages": [{"role": "user", "content": "a"}],
        "n": NUM_ROWS,
        "max_tokens": 1 + NUM_TOKENS,
        "logprobs": True,
        "top_logprobs": num_logprobs - 1,
        "return_tokens_as_token_ids": True,
        "stream": True,
    }


async def until(fleet: Fleet, name: str, num: int) -> None:
    (scheduler,) = fleet.of("scheduler")
    async with asyncio.timeout(30):
        while (await scheduler.metrics())[name] < num:
            await asyncio.sleep(0.02)


async def entries_of(response: aiohttp.ClientResponse) -> dict[int, list[dict[str, Any]]]:
    """The client's entries of each token, by choice."""
    found: dict[int, list[dict[str, Any]]] = {number: [] for number in range(NUM_ROWS)}
    buffer = b""
    async for chunk in response.content.iter_any():
        buffer += chunk
        *events, buffer = buffer.split(b"\n\n")
        for data in (event.removeprefix(b"data: ") for event in events):
            for choice in [] if data == b"[DONE]" else json.loads(data)["choices"]:
                logprobs = choice["logprobs"]
                found[choice["index"]] += logprobs["content"] if logprobs else []
    return found


def check(found: dict[int, list[dict[str, Any]]], num_logprobs: int) -> None:
    for choice, entries in found.items():
        assert len(entries) == 1 + NUM_TOKENS
        for position, entry in enumerate(entries):
            check_token(entry, arrays_of(choice, position, num_logprobs - 1))


def check_token(entry: dict[str, Any], truth: TokenArrays) -> None:
    top = entry["top_logprobs"]
    assert entry["token"] == f"token_id:{truth.ids[0]}"
    assert entry["rank"] == truth.ranks[0]
    assert [each["token"] for each in top] == [f"token_id:{each}" for each in truth.top_ids]
    values = [entry["logprob"], *(each["logprob"] for each in top)]
    assert np.array_equal(np.array(values, np.float32), truth.values)


def largest_step(folder: Path) -> list[int]:
    """Its rows, tokens and bytes."""
    steps = [list(map(int, line.split())) for line in (folder / "steps").read_text().splitlines()]
    return max(steps, key=lambda step: step[-1])


def peaks(members: list[Member]) -> dict[str, int]:
    return {member.kind: peak_bytes(member.process.pid) for member in members}


@pytest.mark.slow
@pytest.mark.parametrize("num_logprobs", [21, 210])
async def test_a_wide_step_arrives_whole_in_bounded_memory_and_others_are_served_meanwhile(
    tmp_path: Path, num_logprobs: int
):
    folder = tmp_path / "steps"
    async with running_fleet(tmp_path, SETTINGS) as fleet:
        url = await started(folder, fleet)
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
            (folder / "hold").touch()
            other = asyncio.create_task(stream(session, url, body_of(0, 1500)))
            await until(fleet, RUNNING, 1)
            body = wide_body(num_logprobs)
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                await until(fleet, WAITING, NUM_ROWS)  # so that one plan admits all of them
                front = [member for member in fleet.members if member.kind != "worker"]
                for member in front:
                    forget_peak(member.process.pid)
                before = peaks(front)
                (folder / "hold").unlink()
                await other  # it shares these steps
                await stream(session, url, body_of(1, 64))
                found = await entries_of(response)
            grown = {kind: peak - before[kind] for kind, peak in peaks(front).items()}
        await fleet.until_idle()
    num_rows, num_tokens, num_bytes = largest_step(folder)
    assert num_rows >= NUM_ROWS
    assert num_tokens >= NUM_ROWS * NUM_TOKENS
    assert num_bytes >= NUM_ROWS * NUM_TOKENS * 4 * (1 + 2 * num_logprobs)
    assert all(growth < 4 * num_bytes + SLACK_BYTES for growth in grown.values()), grown
    check(found, num_logprobs)


def limits() -> list[str]:
    return [path.read_text() for path in sorted(sysv.LIMITS.glob("msg*"))]


@pytest.mark.parametrize("num_logprobs", [pytest.param(21, marks=pytest.mark.slow), 210])
def test_a_system_v_queue_refuses_such_a_step_and_with_msgmax_alone_raised_it_hangs(
    num_logprobs: int,
):
    before, num_bytes = limits(), wide_step(num_logprobs).num_wire_bytes
    at_default = sysv.verdict(num_bytes)
    if at_default.startswith("not tried"):
        pytest.skip(f"an IPC namespace of our own takes root: {at_default}")
    assert at_default == "msgsnd fails: Invalid argument"
    assert sysv.verdict(num_bytes, msgmax=num_bytes) == sysv.WAITS
    assert sysv.verdict(DEFAULT_MSGMNB, msgmax=num_bytes) == sysv.SENT, "the limit is msgmnb"
    assert limits() == before
