"""A mesh with quantized embeddings writes the output of the dequantized ones."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks.harness.checked_load import TIMEOUT
from benchmarks.harness.fleet import running_fleet
from benchmarks.harness.oracle import load_as_qwen2
from services.worker.weights.online import Quantization
from shared.model_folder import EMBEDDED_MODEL
from tests.mesh.forks import fork
from tests.services.worker.checkpoints import assert_greedy, quantized, save_model

PROMPTS = ("import os\n\n\nclass Server:\n    def __init__(self, ", "x = [1, 2, 3, 4, 1, 2, 3", "a")


def save_untied(folder: Path) -> None:
    save_model(folder, LlamaForCausalLM, vocab_size=8192, max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, folder / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "is_tied"), [("wint8", True), ("wint4", False)], ids=["tied", "untied"]
)
async def test_texts_are_those_of_the_numbers_that_the_codes_stand_for(
    tmp_path: Path, form: Quantization, is_tied: bool
) -> None:
    """The embedded model with drafts of its MTP head, and a model with its own head."""
    if is_tied:
        model, oracle = EMBEDDED_MODEL, load_as_qwen2(EMBEDDED_MODEL)
    else:
        model = tmp_path / "model"
        save_untied(model)
        oracle = AutoModelForCausalLM.from_pretrained(model).eval()
    settings = {"MODEL": str(model), "EMBEDDING_QUANTIZATION": form, "DTYPE": "float32"}
    replies = await answers(tmp_path / "mesh", settings)
    num_accepted = 0
    with quantized(oracle, "none", of_embeddings=form):
        for reply in replies:
            (choice,) = reply["choices"]
            assert_greedy(oracle, choice["prompt_token_ids"], choice["token_ids"])
            details = reply["usage"].get("completion_tokens_details", {})
            num_accepted += details.get("accepted_prediction_tokens", 0)
    assert (num_accepted > 0) == is_tied


async def answers(directory: Path, settings: dict[str, str]) -> list[dict[str, Any]]:
    """Answers to all prompts, sent at once."""
    directory.mkdir()
    async with running_fleet(directory, settings | {"MAX_MODEL_LEN": "512"}, fork) as fleet:
        for kind in ("scheduler", "tokenizer", "worker"):
            await fleet.start(kind)
        gateway = await fleet.start("gateway")
        await fleet.until_ready()
        async with aiohttp.ClientSession(f"{gateway.url}/v1/", timeout=TIMEOUT) as session:
            return await asyncio.gather(*(answer(session, prompt) for prompt in PROMPTS))


async def answer(session: aiohttp.ClientSession, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    async with session.post("completions", json=body) as response:
        reply: dict[str, Any] = await response.json()
        assert response.status == 200, reply
        return reply
