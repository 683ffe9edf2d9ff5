"""The same decode through a whole server, compared with the engine in this process, and with the
default share of a stream beside prompts."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.gpu.suite import Suite
from benchmarks.load import load
from shared.settings.scheduler import SchedulerConfig

NUM_WAVES = 4  # of a closed loop
STREAM_RATES = (0.0, SchedulerConfig.model_fields["min_stream_rate"].default)


def measure(
    suite: Suite, folder: Path, limit_s: float, num_ranks: int = 1
) -> Iterator[dict[str, Any]]:
    """Measures the model in ``folder`` on ``num_ranks`` ranks: each batch once, then the largest in
    a closed loop. Raises TimeoutError after it stopped the server."""
    rows: list[dict[str, Any]] = []

    async def within() -> None:
        async with asyncio.timeout(limit_s):
            for rate in STREAM_RATES:
                found = server(
                    suite,
                    folder,
                    "--no-enable-prefix-caching",
                    **{"min-stream-rate": rate, "tensor-parallel-size": num_ranks},
                )
                await _measure(suite, found, {"min_stream_rate": rate}, rows)

    try:
        asyncio.run(within())
    finally:
        yield from rows


async def _measure(
    suite: Suite, measured: servers.Server, setting: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    """Appends to ``rows``."""
    started_s = time.monotonic()
    async with servers.running(measured) as url:
        ready_s = time.monotonic() - started_s
        for num, waves in (
            *((num, 1) for num in suite.mesh_batches),
            (suite.batches[-1], NUM_WAVES),
        ):
            found = await load(
                url,
                concurrency=num,
                num_requests=num * waves,
                warmup=num,
                input_len=suite.prompt_len,
                output_len=suite.output_len,
                vocab_size=suite.model["vocab_size"],
                seed=num,
            )
            rows.append(
                setting
                | {
                    "num_rows": num,
                    "waves": waves,
                    "ready_s": ready_s,
                    "ttft_ms": found["ttft_ms"]["p50"],
                    "tpot_ms": found["tpot_ms"]["p50"],
                    "decode_tokens_per_s": num / found["tpot_ms"]["p50"] * 1e3,
                    "tokens_per_s": found["output_tokens_per_s"],
                }
            )


def server(suite: Suite, folder: Path, *switches: str, **flags: Any) -> servers.Server:
    flags = {
        "load-format": "dummy",
        "max-model-len": suite.max_model_len,
        "max-num-seqs": max(suite.batches),
        "num-gpu-blocks-override": suite.num_blocks,
        "cudagraph-capture-sizes": ",".join(map(str, suite.batches)),
        "device": suite.device.type,
    } | flags
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return servers.shoal(folder, *switches, *words)
