"""Throughput and CPU cost per token of each service in front of the worker.

Gateway, tokenizer and scheduler run as processes with a worker of instant steps; a client that only
counts bytes reads streams over HTTP. All five share the machine.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.harness.fleet import Fleet, Member, running_fleet
from benchmarks.report import spread, write

NUMS_STREAMS = (1, 64, 256)
NUM_TOKENS = 40_000  # of all streams of a run
MAX_TOKENS_EACH = 1900
KINDS = ("gateway", "tokenizer", "scheduler", "worker")


async def stream(port: int, max_tokens: int) -> None:
    """Reads one stream to its end, with minimal client work."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {"prompt": "Once", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    ).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    tail = b""
    while data := await reader.read(1 << 16):
        tail = (tail + data)[-64:]
    if b"[DONE]" not in tail:
        raise RuntimeError(f"a stream ended with {tail!r}")
    writer.close()


def cpu_s(member: Member) -> float:
    fields = Path(f"/proc/{member.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run(fleet: Fleet, num_streams: int) -> dict[str, float]:
    """Tokens per second, and CPU microseconds per token of each service."""
    members = {kind: fleet.of(kind)[0] for kind in KINDS}
    max_tokens = min(MAX_TOKENS_EACH, NUM_TOKENS // num_streams)
    port = members["gateway"].port
    before = {kind: cpu_s(member) for kind, member in members.items()}
    started_s = time.perf_counter()
    await asyncio.gather(*(stream(port, max_tokens) for _ in range(num_streams)))
    seconds = time.perf_counter() - started_s
    num_tokens = num_streams * max_tokens
    costs = {
        f"{kind} CPU us/token": (cpu_s(member) - before[kind]) / num_tokens * 1e6
        for kind, member in members.items()
    }
    return {"tokens/s": num_tokens / seconds, **costs}


async def measure(num_rounds: int) -> dict[str, Any]:
    runs: dict[int, list[dict[str, float]]] = defaultdict(list)
    settings = {"MAX_NUM_SEQS": "256"}
    with tempfile.TemporaryDirectory() as directory:
        async with running_fleet(Path(directory), settings) as fleet:
            await fleet.start("worker", module="benchmarks.fake_worker")
            await fleet.start_all(scheduler=1, tokenizer=1, gateway=1)
            await run(fleet, 16)
            for _ in range(num_rounds):
                for num in NUMS_STREAMS:
                    runs[num].append(await run(fleet, num))
    return {f"{num} streams": _summary(rounds) for num, rounds in runs.items()}


def _summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    summary: dict[str, Any] = {name: spread([each[name] for each in rounds]) for name in rounds[0]}
    for kind in KINDS:
        summary[f"{kind} tokens/s per core"] = round(
            1e6 / max(summary[f"{kind} CPU us/token"]["median"], 1e-9)
        )
    return summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    write("front", asyncio.run(measure(parser.parse_args().rounds)))
