"""The same decode through a whole server, beside what the engine does in this process."""

import asyncio
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.gpu.suite import Suite
from benchmarks.load import load


def measure(suite: Suite, folder: Path, limit_s: float) -> list[dict[str, Any]]:
    """Of the model in ``folder``. Raises TimeoutError, when the server is gone."""

    async def within() -> list[dict[str, Any]]:
        async with asyncio.timeout(limit_s):
            return await _measure(suite, folder)

    return asyncio.run(within())


async def _measure(suite: Suite, folder: Path) -> list[dict[str, Any]]:
    rows = []
    async with servers.running(_server(suite, folder)) as url:
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
                    "ttft_ms": found["ttft_ms"]["p50"],
                    "tpot_ms": found["tpot_ms"]["p50"],
                    "decode_tokens_per_s": num / found["tpot_ms"]["p50"] * 1e3,
                    "tokens_per_s": found["output_tokens_per_s"],
                }
            )
    return rows


def _server(suite: Suite, folder: Path) -> servers.Server:
    flags = {
        "load-format": "dummy",
        "max-model-len": suite.max_model_len,
        "max-num-seqs": max(suite.batches),
        "num-gpu-blocks-override": suite.num_blocks,
        "cudagraph-capture-sizes": ",".join(map(str, suite.mesh_batches)),
        "device": suite.device.type,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return servers.shoal(folder, "--no-enable-prefix-caching", *words)
