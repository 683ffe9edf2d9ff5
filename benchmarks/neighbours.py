"""What do chats feel of clients beside them that ask for a lot?

Eight streams of short chats, alone and beside neighbours of several kinds: milliseconds from one
chunk with tokens to the next, as the client sees them; a chunk is a token unless one waited for
the next. This checkout and an earlier one take turns; each measurement has a server that was
started for it. Servers, the measuring client and the neighbours, a process of their own, share the
machine's cores.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import servers
from benchmarks.load import result_of_load
from benchmarks.neighbour_clients import KINDS
from benchmarks.report import spread, write
from shared.model_folder import EMBEDDED_MODEL

ALONE = "alone"
NUM_STREAMS = 8
PERCENTILES = {"p50": 50, "p99": 99, "max": 100}
SHOWS_ALL = {"skip_special_tokens": False}  # else what comes after an answer's end is no chunk
LEAD_S = 2  # until the neighbours are in the way
MAX_MODEL_LEN = 32_768
NUM_BLOCKS = 8192
FLAGS = (
    *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
    *("--speculative-config", '{"method": "none"}'),  # else a chunk has several tokens
)

Figures = dict[str, float]


async def measure_one(server: servers.Server, name: str, num_requests: int) -> Figures:
    """Figures of the chats, and how many of the neighbours' requests were answered."""
    facts: Figures = {}
    async with servers.running(server) as url, _neighbours(url, name, facts):
        result = await result_of_load(
            url,
            endpoint="chat",
            concurrency=NUM_STREAMS,
            num_requests=num_requests,
            warmup=NUM_STREAMS,
            input_len=8,
            output_len=64,
            extra_body=json.dumps(SHOWS_ALL),
        )
    gaps_ms = [gap_s * 1000 for row in result.rows for gap_s in row.itls_s]
    ttfts_ms = [row.ttft_s * 1000 for row in result.rows]
    figures = _percentiles("between chunks", gaps_ms) | _percentiles("to the first", ttfts_ms)
    figures["chunks of an answer"] = len(gaps_ms) / len(result.rows) + 1
    return figures | {"tokens/s": result.figures["output_tokens_per_s"]} | facts


def _percentiles(name: str, times_ms: list[float]) -> Figures:
    return {
        f"ms {name}, {each}": float(np.percentile(times_ms, share))
        for each, share in PERCENTILES.items()
    }


@asynccontextmanager
async def _neighbours(url: str, name: str, facts: Figures) -> AsyncIterator[None]:
    """``facts`` gets how many of their requests were answered a second."""
    if name == ALONE:
        yield
        return
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.neighbour_clients", url, name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=servers.ROOT,
    )
    try:
        await asyncio.sleep(LEAD_S)
        yield
    finally:
        text, _ = await process.communicate(b"")  # which closes its stdin
    if process.returncode:
        raise RuntimeError(f"the neighbours ended with {process.returncode}")
    facts["neighbours' requests/s"] = float(text)


@contextmanager
def _long_model() -> Iterator[Path]:
    """The embedded model with a larger context, so that long texts are not refused unread."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / EMBEDDED_MODEL.name
        shutil.copytree(EMBEDDED_MODEL, folder)
        path = folder / "config.json"
        config = json.loads(path.read_text()) | {"max_position_embeddings": MAX_MODEL_LEN}
        path.write_text(json.dumps(config))
        yield folder


async def measure(folders: dict[str, Path], num_rounds: int, num_requests: int) -> dict[str, Any]:
    runs: dict[str, dict[str, list[Figures]]] = {
        name: {checkout: [] for checkout in folders} for name in (ALONE, *KINDS)
    }
    with _long_model() as model:
        for _ in range(num_rounds):
            for name, by_checkout in runs.items():
                for checkout, folder in folders.items():
                    server = servers.checkout("--model", str(model), *FLAGS, folder=folder)
                    by_checkout[checkout].append(await measure_one(server, name, num_requests))
                    print(f"{name}, {checkout}: {by_checkout[checkout][-1]}", file=sys.stderr)
    return {
        name if name == ALONE else f"beside {name}": {
            checkout: {figure: spread([run[figure] for run in runs]) for figure in runs[0]}
            for checkout, runs in by_checkout.items()
        }
        for name, by_checkout in runs.items()
    }


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(command, text=True).strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64, help="chats of a measurement")
    arguments = parser.parse_args()
    folders = {"before": arguments.before.resolve(), "now": servers.ROOT}
    results = uvloop.run(measure(folders, arguments.rounds, arguments.requests))
    commits = {checkout: _commit(folder) for checkout, folder in folders.items()}
    write("neighbours", {"commits": commits} | results)
