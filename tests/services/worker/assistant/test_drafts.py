"""Drafts by assistant models are those of transformers' classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import scheduled
from benchmarks.harness.engines import KERNELS, make_engine
from benchmarks.harness.scheduled import Run
from shared.wire.messages import SamplingParams
from tests.services.worker.assistant.checkpoints import (
    CLUSTERS,
    NUM_CHOSEN,
    NUM_CLUSTERS,
    OF_HEADS,
    OF_MODELS,
    PlainAssistant,
    change_keys,
    save_assistant,
    save_target,
)
from tests.services.worker.checkpoints import VOCAB_SIZE, random_prompts
from tests.services.worker.gemma4 import WINDOW
from tests.services.worker.speculation import iter_positions

GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=10, logprobs=0, draft_logprobs=True)
NUM_DRAFTED = VOCAB_SIZE // NUM_CLUSTERS * NUM_CHOSEN


def assisted(assistant: Path, **more: Any) -> dict[str, Any]:
    return {
        "method": "mtp",
        "model": str(assistant),
        "num_speculative_tokens": 4,
        "adaptive": False,
    } | more


def check_drafts(
    model: Path,
    assistant: Path,
    kernels: str,
    prompts: list[list[int]],
    num_drafted: int = VOCAB_SIZE,
    **settings: Any,
) -> Run:
    engine = make_engine(model, kernels, speculative_config=assisted(assistant), **settings)
    plain, num_seen = PlainAssistant(model, assistant), 0
    done = scheduled.run(engine, prompts, GREEDY)
    assert max(map(len, prompts)) > 2 * WINDOW
    for index, prompt in enumerate(prompts):
        positions = iter_positions(done.verified[index])
        for (_, part), position in zip(done.drafts[index], positions, strict=True):
            ids, drafts = prompt + done.texts[index][:position], part.ids.tolist()
            logits = plain.draft_logits(ids, drafts[:-1])
            places = range(len(drafts))
            assert (logits.amax(1) - logits[places, drafts]).max() < 1e-3
            likely = logits.topk(num_drafted).values
            logprobs = logits[places, drafts] - likely.logsumexp(-1)
            np.testing.assert_allclose(part.values, logprobs, atol=2e-3)
            num_seen += len(drafts)
    assert num_seen > 60
    return done


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", OF_MODELS)
def test_drafts_match_transformers(tmp_path: Path, name: str, kernels: str) -> None:
    save_target(tmp_path, name)
    save_assistant(tmp_path / "assistant", name)
    check_drafts(tmp_path, tmp_path / "assistant", kernels, random_prompts(4))


@pytest.mark.parametrize("kernels", KERNELS)
def test_tokens_of_likely_clusters_are_drafted(tmp_path: Path, kernels: str) -> None:
    save_target(tmp_path)
    save_assistant(tmp_path / "assistant", **CLUSTERS)
    change_keys(tmp_path / "assistant", OF_HEADS, {})
    check_drafts(tmp_path, tmp_path / "assistant", kernels, random_prompts(4), NUM_DRAFTED)


@pytest.mark.parametrize("kernels", KERNELS)
def test_blocks_behind_windows_are_given_back(tmp_path: Path, kernels: str) -> None:
    """And drafts read none of them."""
    save_target(tmp_path)
    save_assistant(tmp_path / "assistant")
    long = [(5 * prompt)[:100] for prompt in random_prompts(6) if len(prompt) > 20]
    done = check_drafts(tmp_path, tmp_path / "assistant", kernels, long, max_num_batched_tokens=24)
    assert done.num_drops > 0
