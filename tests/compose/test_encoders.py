"""`compose/encoder.yml`: another container encodes the images of the workers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from benchmarks.harness.stack import FILES, Stack, running_stack
from tests.media.checkpoints import save_checkpoint
from tests.media.pictures import picture
from tests.mesh.test_images import QUESTION, ask

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

LINKED = 'shoal_peers{service="worker"}'
LINKED_WITHIN_S = 60  # until then the worker encodes its images
ENCODED = "shoal_worker_encoded_tokens_total"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(
    engine: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder)
    for path in (folder.parent, folder, *folder.iterdir()):
        path.chmod(0o755)  # containers have another user
    settings = {"SHOAL_MODEL": str(folder)}
    files = (*FILES, "compose/encoder.yml", "tests/compose/encoder.yml")
    async with running_stack(engine | settings, files) as stack:
        yield stack
    assert await stack.leftovers() == ""


async def test_a_file_adds_an_encoder_of_images(stack: Stack) -> None:
    (encoder,), (worker,) = [await stack.containers(each) for each in ("encoder", "worker")]
    async with asyncio.timeout(LINKED_WITHIN_S):
        while (await stack.metrics(encoder)).get(LINKED) != 1:
            await asyncio.sleep(0.2)
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        (model,) = [each.id async for each in client.models.list()]
        asked: Any = [ask(picture(1, 120, 100), QUESTION)]
        answer = await client.chat.completions.create(model=model, messages=asked, max_tokens=4)
    assert answer.usage
    assert answer.usage.completion_tokens == 4
    assert (await stack.metrics(encoder))[ENCODED] > 0
    assert (await stack.metrics(worker))[ENCODED] == 0
