"""A batch of ``/v1/batches``, and the death of its gateway."""

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAIError
from openai.types import Batch

from tests.cli.serving import Serving, serving

NUM_LINES = 300
BODY = {"model": "any", "prompt": "import", "max_tokens": 8, "temperature": 0}


def lines() -> bytes:
    each = ({"custom_id": f"id-{n}", "method": "POST", "body": BODY} for n in range(NUM_LINES))
    return "\n".join(json.dumps(line | {"url": "/v1/completions"}) for line in each).encode()


async def batch_when(client: AsyncOpenAI, batch_id: str, num_completed: int) -> Batch:
    """Waits for this number of answered requests."""
    async with asyncio.timeout(120):
        while True:
            try:
                batch = await client.batches.retrieve(batch_id)
            except OpenAIError:  # the gateway is starting
                await asyncio.sleep(0.2)
                continue
            counts = batch.request_counts
            assert batch.status in ("validating", "in_progress", "finalizing", "completed")
            if counts is not None and counts.completed >= num_completed:
                return batch
            await asyncio.sleep(0.02)


async def kill_gateway(server: Serving) -> None:
    os.kill(server.children()["gateway"], signal.SIGKILL)


@pytest.mark.slow
async def test_a_batch_goes_on_after_its_gateway_is_killed(tmp_path: Path) -> None:
    flags = ["--batch-dir", str(tmp_path / "batches"), "--served-model-name", "any"]
    async with (
        serving(tmp_path / "mesh", *flags) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        await server.until_ready()
        file = await client.files.create(file=("in.jsonl", lines()), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        for share in (1, 2):
            found = await batch_when(client, batch.id, share * NUM_LINES // 4)
            assert found.status == "in_progress"
            await kill_gateway(server)
        async with asyncio.timeout(120):
            while (found := await batch_when(client, batch.id, NUM_LINES)).status != "completed":
                await asyncio.sleep(0.1)
        assert found.output_file_id is not None
        output = (await client.files.content(found.output_file_id)).text
    results = [json.loads(line) for line in output.splitlines()]
    ids = Counter(result["custom_id"] for result in results)
    assert ids == Counter(f"id-{n}" for n in range(NUM_LINES))
    texts = {result["response"]["body"]["choices"][0]["text"] for result in results}
    assert len(texts) == 1
