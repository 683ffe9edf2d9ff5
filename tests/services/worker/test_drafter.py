"""Drafts: by the head as plain torch computes it, by lookup from earlier text."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from kernels.sample.reference import sample_row
from services.worker.speculation.ngram import NgramDrafter
from shared.errors import ConfigError
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import SamplingParams
from tests.services.worker.plain_mtp import PlainMtp
from tests.services.worker.speculation import engine_of, iter_positions, params_of, prompts


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_match_plain_torch_sampled_with_the_random_bits_of_their_positions(
    kernels: str, temperature: float
) -> None:
    plain, some = PlainMtp(EMBEDDED_MODEL), [*prompts()[1:3], prompts()[12]]
    params = params_of(temperature, len(some), logprobs=0, draft_logprobs=True, top_k=50)
    done = scheduled.run(engine_of(kernels, "mtp", 3), some, params)
    num_seen = 0
    for index, prompt in enumerate(some):
        positions = iter_positions(done.verified[index])
        for (_, part), position in list(zip(done.drafts[index], positions, strict=True))[:5]:
            ids, drafts = prompt + done.texts[index][:position], part.ids.tolist()
            logits = plain.draft_logits(ids, drafts[:-1])
            seed, at = params[index].seed, len(ids)
            wanted = [
                sample_row(row, temperature, 50, 1.0, 0.0, 0.0, seed, at + i, 0)
                for i, row in enumerate(logits.numpy())
            ]
            assert drafts == wanted
            logprobs = torch.log_softmax(logits, -1)[range(len(drafts)), drafts]
            np.testing.assert_allclose(part.values, logprobs, atol=1e-3)
            num_seen += 1
    assert num_seen > 9


@pytest.mark.parametrize(
    ("ids", "num", "wanted"),
    [
        ([1, 2, 3, 1, 2], 3, [3, 1, 2]),
        ([1, 2, 3, 1, 2], 1, [3]),
        ([1, 2, 3, 1, 2], 0, []),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 2, [4, 9]),  # the latest
        ([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 2, [5, 8]),  # the longest
        ([1, 2, 3, 4, 5], 3, []),
        ([4, 4, 4, 4], 3, [4]),
        ([1], 3, []),
        ([0, 256, 1, 0, 256], 2, [1, 0]),
        ([65536, 256, 1], 2, []),  # its bytes repeat off an id's boundary
    ],
)
def test_lookup_goes_on_as_it_did_before(ids: list[int], num: int, wanted: list[int]) -> None:
    found = NgramDrafter(2, 3)._continue(np.array(ids, np.int32), num)
    assert found.tolist() == wanted


def test_lookup_is_certain_of_its_drafts() -> None:
    repeated = prompts()[2] * 4
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=20, logprobs=0, draft_logprobs=True)
    done = scheduled.run(engine_of("native", "ngram", 3), [repeated], params)
    assert done.drafts[0]
    for _, part in done.drafts[0]:
        assert part.values.tolist() == [0.0] * len(part.ids)
        assert part.ranks.tolist() == [1] * len(part.ids)


def test_a_head_that_is_not_there_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="method mtp: the model has no MTP head"):
        make_engine(checkpoint, speculative_config={"method": "mtp"})


def test_a_model_with_a_head_drafts_by_default(checkpoint: Path) -> None:
    capacity = make_engine(EMBEDDED_MODEL, max_model_len=64).capacity
    assert (capacity.num_speculative_tokens, capacity.adapts_depth) == (3, True)
    none = make_engine(EMBEDDED_MODEL, max_model_len=64, speculative_config={"method": "none"})
    assert none.capacity.num_speculative_tokens == 0
    assert make_engine(checkpoint).capacity.num_speculative_tokens == 0
