"""Drafts by an assistant model over HTTP: a random Gemma 4 and its assistant in folders of their
own."""

import json
import shutil
from pathlib import Path

import pytest

from shared.model_folder import EMBEDDED_MODEL
from tests.cli.texts import VOCAB_SIZE, check_drafts
from tests.services.worker.assistant.checkpoints import CLUSTERS, save_assistant, save_target

SETTINGS = {"DTYPE": "float32", "SERVED_MODEL_NAME": "any", "MAX_NUM_BATCHED_TOKENS": "39"}


@pytest.mark.slow
async def test_texts_over_http_are_the_same_with_drafts_and_without(tmp_path: Path) -> None:
    """As vLLM is started, with the assistant's name alone. Half of the texts are greedy; at the
    temperature of the others, drafts of a random assistant are often right."""
    model, assistant = tmp_path / "model", tmp_path / "gemma-4-tiny-it-assistant"
    save_target(model, vocab_size=VOCAB_SIZE, initializer_range=0.02)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, model / name)
    clusters = CLUSTERS | {"num_centroids": 64, "centroid_intermediate_top_k": 48}
    save_assistant(assistant, layers={"vocab_size": VOCAB_SIZE}, **clusters)
    drafting = {"model": str(assistant), "num_speculative_tokens": 4, "adaptive": False}
    settings = SETTINGS | {"SPECULATIVE_CONFIG": json.dumps(drafting)}
    await check_drafts(tmp_path / "mesh", model, settings)
