"""A whole server with and without a store of KV blocks: the speed of decoding while blocks are
saved, and the first token of prompts whose blocks the cache has lost."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.gpu.mesh_table import server
from benchmarks.gpu.shapes import token_bytes
from benchmarks.gpu.suite import BLOCK_SIZE, Suite
from benchmarks.load import load

NUM_WAVES = 4  # of new prompts, warm-ups included, before the first ones come again
SPARE = 1.25
MEMORY = Path("/dev/shm")


def measure(suite: Suite, folder: Path, limit_s: float) -> Iterator[dict[str, Any]]:
    """Measures the model in ``folder``. The cache has room for one wave. Raises TimeoutError after
    it stopped the server."""
    num_rows = max(suite.mesh_batches)
    num_blocks = num_rows * (-(-(suite.prompt_len + suite.output_len) // BLOCK_SIZE) + 1)
    block_bytes = BLOCK_SIZE * token_bytes(suite.model, suite.dtype.itemsize)
    store_bytes = int(SPARE * NUM_WAVES * num_blocks * block_bytes)
    rows: list[dict[str, Any]] = []

    async def within(kv: str) -> None:
        async with asyncio.timeout(limit_s):
            for size in (0.0, store_bytes / (1 << 30)):
                flags = {"num-gpu-blocks-override": num_blocks, "min-stream-rate": 0}
                stored = {"kv-offloading-size": size, "kv-offloading-dir": kv} if size else {}
                measured = server(suite, folder, **flags, **stored)
                rows.append({"store_gib": size} | await _measure(suite, measured, num_rows))

    with tempfile.TemporaryDirectory(dir=_memory(store_bytes)) as kv:
        try:
            asyncio.run(within(kv))
        finally:
            yield from rows


def _memory(num_bytes: int) -> Path | None:
    """Where a store is in memory, if that has room; else a folder on a disk, which is cached."""
    if not MEMORY.is_dir():
        return None
    found = os.statvfs(MEMORY)
    return MEMORY if found.f_bavail * found.f_frsize > num_bytes else None


async def _measure(suite: Suite, measured: servers.Server, num_rows: int) -> dict[str, Any]:
    async with servers.running(measured) as url:
        first, _, again = [
            await load(
                url,
                concurrency=num_rows,
                num_requests=num_rows,
                warmup=num_rows if seed == 1 else 0,
                input_len=suite.prompt_len,
                output_len=suite.output_len,
                vocab_size=suite.model["vocab_size"],
                seed=seed,
            )
            for seed in (1, 2, 1)
        ]
    return {
        "num_rows": num_rows,
        "tpot_ms": first["tpot_ms"]["p50"],
        "decode_tokens_per_s": num_rows / first["tpot_ms"]["p50"] * 1e3,
        "ttft_ms": first["ttft_ms"]["p50"],
        "again_ttft_ms": again["ttft_ms"]["p50"],
    }
