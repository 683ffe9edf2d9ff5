"""Drafts by an EAGLE-3 head over HTTP: a random model and a random head in folders of their own."""

import json
import shutil
from pathlib import Path

from transformers import LlamaForCausalLM

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import SamplingParams
from tests.cli.texts import VOCAB_SIZE, drafted_answers, prompts_with_one_beginning
from tests.mesh.forks import one_of_each
from tests.mesh.structured import client_of
from tests.services.worker.checkpoints import save_model
from tests.services.worker.eagle.checkpoints import save_head

SETTINGS = {"DTYPE": "float32", "SERVED_MODEL_NAME": "any", "MAX_NUM_BATCHED_TOKENS": "39"}


async def test_texts_over_http_are_the_same_with_drafts_and_without(tmp_path: Path) -> None:
    """Greedy, and at a temperature at which drafts of a random head are often right."""
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
    prompts = prompts_with_one_beginning()
    async with (
        one_of_each(tmp_path / "mesh", MODEL=str(model), **settings) as fleet,
        client_of(fleet.of("gateway")[0].url) as client,
    ):
        found = await drafted_answers(client, prompts)
    params = [
        SamplingParams(number, temperature=2.0 * (number % 2), max_tokens=24, ignore_eos=True)
        for number in range(len(prompts))
    ]
    plain = make_engine(model, "native", speculative_config={"method": "none"})
    expected = scheduled.run(plain, prompts, params).texts
    assert [each["choices"][0]["token_ids"] for each in found] == expected
    details = [each["usage"]["completion_tokens_details"] for each in found]
    assert sum(each["accepted_prediction_tokens"] for each in details) > 0
