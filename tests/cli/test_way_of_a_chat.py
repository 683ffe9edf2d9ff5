"""Counts the source files a chat runs through on its way down in all four processes: until each
hands its work on, and the worker's engine has the plan."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.cli.serving import Serving, serving

MAX_FILES = 145  # the aim is 80
NUM_ROUNDS = 4  # files that timers call are not a part of each
ROOT = Path(__file__).parents[2]
HOOK = """
import json, os, sys, threading, time

FOLDER, ROOT = os.environ["WAY_FOLDER"], os.environ["WAY_ROOT"]
OURS = tuple(os.path.join(ROOT, name, "") for name in ("services", "shared"))
seen, handed_on = {}, []


def note(frame, event, argument):
    if event == "call":
        name = frame.f_code.co_filename
        if name not in seen and name.startswith(OURS):
            seen[name] = time.monotonic()
        if frame.f_code.co_name == "send" and name.endswith("link/peer.py"):
            message = type(frame.f_locals["message"]).__name__
            if message in ("Submit", "Generate", "StepPlan"):
                handed_on.append(time.monotonic())
        if frame.f_code.co_name == "submit" and name.endswith("engine/host.py"):
            handed_on.append(time.monotonic())


def wait_for(name):
    while not os.path.exists(os.path.join(FOLDER, name)):
        time.sleep(0.01)


def record():
    for number in range(int(os.environ["WAY_ROUNDS"])):
        wait_for(f"start{number}")
        seen.clear()
        handed_on.clear()
        path = os.path.join(FOLDER, f"{os.getpid()}.{number}")
        open(f"{path}.begun", "w").close()
        wait_for(f"stop{number}")
        with open(path, "w") as file:
            json.dump([seen, handed_on], file)
        os.rename(path, f"{path}.json")


if any(word.startswith("services.") for word in sys.orig_argv):
    threading.Thread(target=record, daemon=True).start()
    threading.setprofile(note)
    sys.setprofile(note)
"""


@pytest.mark.slow
async def test_a_chat_runs_through_few_files_on_its_way_down(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    names = {"PYTHONPATH": paths, "WAY_FOLDER": str(tmp_path), "WAY_ROOT": str(ROOT)}
    names["WAY_ROUNDS"] = str(NUM_ROUNDS)
    prefix = ("env", *(f"{name}={value}" for name, value in names.items()))
    async with serving(tmp_path / "mesh", prefix=prefix) as served:
        await served.until_ready()
        await chat(served.client())
        ways = [await way_of_a_chat(served, tmp_path, number) for number in range(NUM_ROUNDS)]
    files = set.intersection(*ways)
    ours = sorted(str(Path(name).relative_to(ROOT)) for name in files)
    assert 40 < len(ours) <= MAX_FILES, "\n".join(ours)


async def way_of_a_chat(served: Serving, folder: Path, number: int) -> set[str]:
    (folder / f"start{number}").touch()
    num = len(served.children())
    await files_of(folder, f"*.{number}.begun", num)
    await chat(served.client())
    (folder / f"stop{number}").touch()
    dumps = await files_of(folder, f"*.{number}.json", num)
    found: list[Any] = [json.loads(path.read_text()) for path in dumps]
    assert all(handed_on for _, handed_on in found)
    return {name for seen, ends in found for name, at_s in seen.items() if at_s <= ends[0]}


async def chat(client: AsyncOpenAI) -> None:
    async with client:
        stream = await client.chat.completions.create(
            model="shoal-tiny",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=4,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
            stream=True,
        )
        async for _ in stream:
            pass


async def files_of(folder: Path, pattern: str, num: int) -> list[Path]:
    async with asyncio.timeout(20):
        while len(found := [*folder.glob(pattern)]) < num:
            await asyncio.sleep(0.05)
    return found
