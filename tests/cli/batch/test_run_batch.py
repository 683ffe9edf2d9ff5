"""``shoal run-batch`` as a user starts it, with its own mesh, killed and started again."""

import asyncio
import json
import os
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import services_of
from tests.cli.serving import is_alive, serving

ROOT = Path(__file__).parents[3]
BODY = {"model": "shoal-tiny", "prompt": "import", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def write_input(path: Path, num: int) -> None:
    """Text completions, one request of each other kind, one line that is not JSON and one for an
    unknown model."""
    lines = [
        {"custom_id": f"id-{n}", "method": "POST", "url": "/v1/completions", "body": BODY}
        for n in range(num)
    ]
    lines[1] |= {"url": "/v1/chat/completions", "body": CHAT}
    lines[4] |= {"url": "/v1/responses", "body": {"input": "Hello", "max_output_tokens": 2}}
    lines[5] |= {"url": "/v1/messages", "body": CHAT}
    lines[2] |= {"body": BODY | {"model": "whale"}}
    texts = [json.dumps(line) for line in lines]
    texts[3] = "{"
    path.write_text("\n".join(texts) + "\n")


async def start(
    folder: Path, *flags: str, output: int = asyncio.subprocess.PIPE
) -> asyncio.subprocess.Process:
    own = () if "--url" in flags else ("--mesh-dir", str(folder / "mesh"))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from cli.main import main; main()", "run-batch"),
        *("-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), *own, *flags),
        cwd=ROOT,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
        env={"SHOAL_NUM_THREADS": "1"} | os.environ,
    )


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()]


async def run_killed_half_way(folder: Path, num: int) -> None:
    write_input(folder / "in.jsonl", num)
    out = folder / "out.jsonl"
    first = await start(folder)
    async with asyncio.timeout(120):
        while not out.exists() or out.read_bytes().count(b"\n") < num // 3:
            assert first.returncode is None, (await first.stdout.read()).decode()
            await asyncio.sleep(0.02)
    pids = services_of(folder / "mesh").values()
    first.kill()
    await first.wait()
    num_before = out.read_bytes().count(b"\n")
    assert num_before < num, "it was killed in the middle"
    async with asyncio.timeout(30):
        while any(is_alive(pid) for pid in pids):
            await asyncio.sleep(0.05)
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req_')  # left by a kill during a write
    summary = folder / "summary.json"
    again = await start(folder, "--json", str(summary))
    said = (await asyncio.wait_for(again.stdout.read(), 250)).decode()
    assert await again.wait() == 1, said
    found = results(folder)
    ids = {f"id-{n}": 1 for n in range(num)} | {None: 1}
    del ids["id-3"]
    assert Counter(each["custom_id"] for each in found) == ids
    by_id = {each["custom_id"]: each for each in found}
    assert by_id[None]["error"]["code"] == "invalid_json_line"
    assert by_id["id-2"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert by_id["id-1"]["response"]["body"]["object"] == "chat.completion"
    assert by_id["id-4"]["response"]["body"]["object"] == "response"
    assert by_id["id-5"]["response"]["body"]["type"] == "message"
    texts = {
        each["response"]["body"]["choices"][0]["text"]
        for custom_id, each in by_id.items()
        if custom_id not in (None, "id-1", "id-2", "id-4", "id-5")
    }
    assert len(texts) == 1, "greedy text is the same in both runs"
    said_json = json.loads(summary.read_text())
    assert (said_json["total"], said_json["completed"], said_json["failed"]) == (num, num - 2, 2)
    assert said_json["num_done_before"] == num_before
    assert said_json["stopped"] is None
    assert not [*(folder / "mesh").iterdir()]


@pytest.mark.slow
async def test_after_a_kill_the_same_command_ends_with_each_line_once(tmp_path: Path):
    await run_killed_half_way(tmp_path, 400)


@pytest.mark.slow
async def test_after_a_kill_ten_thousand_lines_are_there_once(tmp_path: Path):
    await run_killed_half_way(tmp_path, 10_000)


@pytest.mark.slow
async def test_a_server_that_runs_answers_too(tmp_path: Path):
    write_input(tmp_path / "in.jsonl", 30)
    async with serving(tmp_path / "serve", "--api-key", "secret") as shoal:
        await shoal.until_ready()
        process = await start(tmp_path, "--url", shoal.url, "--api-key", "wrong")
        said = (await process.stdout.read()).decode()
        assert await process.wait() == 2, said
        assert "refuses the API key, or needs one" in said
        assert {each["custom_id"] for each in results(tmp_path)} <= {None}, "line 4 is wrong"
        process = await start(tmp_path, "--url", shoal.url, "--api-key", "secret")
        said = (await process.stdout.read()).decode()
        assert await process.wait() == 1, said
    assert len(results(tmp_path)) == 30


@pytest.mark.seconds
async def test_a_terminal_shows_how_far_it_is_and_of_the_log_nothing_usual(tmp_path: Path):
    write_input(tmp_path / "in.jsonl", 6)
    ours, theirs = os.openpty()
    process = await start(tmp_path, output=theirs)
    os.close(theirs)
    said = b""
    with suppress(OSError):  # raised once the other end is closed
        while data := await asyncio.to_thread(os.read, ours, 4096):
            said += data
    os.close(ours)
    assert await process.wait() == 1
    assert b"0/6" in said
    assert b"6 of 6 lines" in said
    assert b" INFO " not in said


@pytest.mark.slow
async def test_a_mesh_that_cannot_start_says_why(tmp_path: Path):
    write_input(tmp_path / "in.jsonl", 6)
    process = await start(tmp_path, "--model", str(tmp_path / "none"))
    said = (await asyncio.wait_for(process.stdout.read(), 60)).decode()
    assert await process.wait() == 2, said
    assert str(tmp_path / "none") in said
