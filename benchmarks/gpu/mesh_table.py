"""The same decode through a whole server, compared with the engine in this process."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.gpu.suite import Suite
from benchmarks.load import load


def measure(
    suite: Suite, folder: Path, limit_s: float, num_ranks: int = 1
) -> Iterator[dict[str, Any]]:
    """Measures the model in ``folder`` on ``num_ranks`` ranks. Raises TimeoutError after it stopped
    the server."""
    rows: list[dict[str, Any]] = []

    async def within() -> None:
        async with asyncio.timeout(limit_s):
            await _measure(suite, _server(suite, folder, num_ranks), rows)

    try:
        asyncio.run(within())
    finally:
        yield from rows


async def _measure(suite: Suite, server: servers.Server, rows: list[dict[str, Any]]) -> None:
    """Appends to ``rows``."""
    started_s = time.monotonic()
    async with servers.running(server) as url:
        ready_s = time.monotonic() - started_s
        for num in suite.mesh_batches:
            found = await load(
                url,
                concurrency=num,
                num_requests=num,
                warmup=num,
                input_len=suite.prompt_len,
                output_len=suite.output_len,
                vocab_size=suite.model["vocab_size"],
                seed=num,
            )
            rows.append(
                {
                    "num_rows": num,
                    "ready_s": ready_s,
                    "ttft_ms": found["ttft_ms"]["p50"],
                    "tpot_ms": found["tpot_ms"]["p50"],
                    "decode_tokens_per_s": num / found["tpot_ms"]["p50"] * 1e3,
                    "tokens_per_s": found["output_tokens_per_s"],
                }
            )


def _server(suite: Suite, folder: Path, num_ranks: int) -> servers.Server:
    flags = {
        "tensor-parallel-size": num_ranks,
        "load-format": "dummy",
        "max-model-len": suite.max_model_len,
        "max-num-seqs": max(suite.batches),
        "num-gpu-blocks-override": suite.num_blocks,
        "cudagraph-capture-sizes": ",".join(map(str, suite.mesh_batches)),
        "device": suite.device.type,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return servers.shoal(folder, "--no-enable-prefix-caching", *words)
