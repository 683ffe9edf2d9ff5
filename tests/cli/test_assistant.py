"""Drafts by an assistant model over HTTP: a random Gemma 4 and its assistant in folders of their
own."""

import json
import shutil
from pathlib import Path

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import SamplingParams
from tests.cli.texts import VOCAB_SIZE, drafted_answers, prompts_with_one_beginning
from tests.mesh.forks import one_of_each
from tests.mesh.structured import client_of
from tests.services.worker.assistant.checkpoints import CLUSTERS, save_assistant, save_target

SETTINGS = {"DTYPE": "float32", "SERVED_MODEL_NAME": "any", "MAX_NUM_BATCHED_TOKENS": "39"}


async def test_texts_over_http_are_the_same_with_drafts_and_without(tmp_path: Path) -> None:
    """As vLLM is started: the assistant's name says what it is. Greedy, and at a temperature at
    which drafts of a random assistant are often right."""
    model, assistant = tmp_path / "model", tmp_path / "gemma-4-tiny-it-assistant"
    save_target(model, vocab_size=VOCAB_SIZE, initializer_range=0.02)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, model / name)
    clusters = CLUSTERS | {"num_centroids": 64, "centroid_intermediate_top_k": 48}
    save_assistant(assistant, layers={"vocab_size": VOCAB_SIZE}, **clusters)
    drafting = {"model": str(assistant), "num_speculative_tokens": 4, "adaptive": False}
    settings = SETTINGS | {"SPECULATIVE_CONFIG": json.dumps(drafting)}
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
