"""Drafts by an EAGLE-3 head over HTTP: a random model and a random head in folders of their own."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from shared.model_folder import EMBEDDED_MODEL
from tests.cli.texts import VOCAB_SIZE, check_drafts
from tests.services.worker.checkpoints import save_model
from tests.services.worker.eagle.checkpoints import save_head

SETTINGS = {"DTYPE": "float32", "SERVED_MODEL_NAME": "any", "MAX_NUM_BATCHED_TOKENS": "39"}


@pytest.mark.slow
async def test_texts_over_http_are_the_same_with_drafts_and_without(tmp_path: Path) -> None:
    """Half are greedy; at the temperature of the others, drafts of a random head are often
    right."""
    model, head = tmp_path / "model", tmp_path / "head"
    save_model(
        model,
        LlamaForCausalLM,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=128,
        initializer_range=0.02,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, model / name)
    save_head(head, layout="speculators", vocab_size=VOCAB_SIZE, draft_vocab_size=6000)
    drafting = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    settings = SETTINGS | {"SPECULATIVE_CONFIG": json.dumps(drafting | {"adaptive": False})}
    await check_drafts(tmp_path / "mesh", model, settings)
