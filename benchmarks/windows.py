"""Memory and first tokens of chats with a model of mostly windowed layers.

Eight chats of five turns take turns on whole servers: the code of another checkout, before layers
had groups, this code, and llama.cpp, which keeps windows alone too. The servers of ours have the
KV memory of four chats with the blocks of all layers; llama.cpp has a slot for each chat.
"""

import argparse
import json
import re
import time
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import uvloop

from benchmarks import servers
from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.report import spread, write

NUM_CHATS, NUM_TURNS = 8, 5
FIRST, TURN, ANSWER = 1_600, 160, 64  # tokens
MAX_LEN = 4_096
LAST = FIRST + (NUM_TURNS - 1) * (TURN + ANSWER) + ANSWER
SHAPE = SHAPES["windows"]
TOKEN_BYTES = 4 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
FLAGS = (
    *("--kv-cache-memory-bytes", str(NUM_CHATS // 2 * LAST * TOKEN_BYTES)),
    *("--max-model-len", str(MAX_LEN), "--enable-prompt-tokens-details"),
)


def ours(model: Path, folder: Path, name: str) -> servers.Server:
    flags = "--model", str(model), "--dtype", "bfloat16", *FLAGS
    return servers.checkout(*flags, name=name, folder=folder)


def llama(program: Path, gguf: Path, num_chats: int = NUM_CHATS) -> servers.Server:
    command = [str(program), "--model", str(gguf), "--parallel", str(num_chats)]
    command += ["--ctx-size", str(num_chats * MAX_LEN), "--threads", "2"]
    command += ["--log-verbosity", "4"]  # for the sizes of its caches
    return servers.Server("llama.cpp", command)


async def chat(url: str, seed: int, num_chats: int) -> list[dict[str, float]]:
    """The median time to the first token of each turn in ms, and the cached share of earlier tokens
    as told by the server."""
    prompts = [_ids(FIRST, seed, number) for number in range(num_chats)]
    turns = []
    # llama.cpp ends kept connections.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        for turn in range(NUM_TURNS):
            first_ms, num_cached, num_known = [], 0.0, 0
            for number, prompt in enumerate(prompts):
                found = await _ask(session, url, prompt)
                first_ms.append(found["first_ms"])
                num_cached += found["num_cached"]
                num_known += len(prompt) - TURN - ANSWER if turn else 0
                answer = [10 + place for place in range(ANSWER)]  # the same for every server
                prompt += [*answer, *_ids(TURN, seed, number, turn)]
            share = num_cached / num_known if num_known else 0.0
            turns.append({"first_ms": median(first_ms), "cached": share})
    return turns


def _on_cache(line: str) -> str:
    """The part of a line of a log about the KV cache, or nothing."""
    found = re.search(r"KV cache: .*|\S*KV buffer size.*|maximum concurrency.*", line)
    return found[0] if found else ""


def _ids(num: int, *seeds: int) -> list[int]:
    start = hash(seeds) % 3000
    return [10 + (start + 7 * place * place) % 4000 for place in range(num)]


async def _ask(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> dict[str, float]:
    body = {
        "prompt": prompt,
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_s, first_s, num_cached = time.perf_counter(), 0.0, 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            first_s = first_s or time.perf_counter()
            usage = json.loads(line[6:]).get("usage") or {}
            num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", num_cached)
    return {"first_ms": 1000 * (first_s - started_s), "num_cached": num_cached}


async def measure(
    fleet: list[servers.Server], num_rounds: int, num_chats: int = NUM_CHATS
) -> dict[str, Any]:
    runs: dict[str, list[list[dict[str, float]]]] = {each.name: [] for each in fleet}
    logs: dict[str, list[str]] = {each.name: [] for each in fleet}
    for seed in range(num_rounds):
        for server in fleet:
            async with servers.running(server, logs[server.name]) as url:
                runs[server.name].append(await chat(url, seed, num_chats))
    return {name: _figures(found, logs[name]) for name, found in runs.items()}


def _figures(found: list[list[dict[str, float]]], log: list[str]) -> dict[str, Any]:
    """Of the second turn and the last."""
    turns = {
        f"turn {turn + 1}": {
            "time to the first token, ms": spread([each[turn]["first_ms"] for each in found]),
            "cached share": spread([each[turn]["cached"] for each in found]),
        }
        for turn in (1, NUM_TURNS - 1)
    }
    return {"KV cache": list(dict.fromkeys(filter(None, map(_on_cache, log)))), **turns}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout without groups")
    parser.add_argument("--llama", type=Path, required=True, help="the program llama-server")
    parser.add_argument("--gguf", type=Path, required=True, help="the model for it")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = checkpoint("windows")
    every = [
        ours(model, arguments.before, "before"),
        ours(model, servers.ROOT, "groups"),
        llama(arguments.llama, arguments.gguf),
    ]
    write("windows", uvloop.run(measure(every, arguments.rounds)))
