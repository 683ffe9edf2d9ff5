"""Drafts and outputs are unchanged by the fate of the blocks with the head's KV: cached, cut, taken
away, left with gaps, or filled with non-finite values."""

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, make_engine
from benchmarks.harness.scheduled import Run
from services.worker.layers.weights import Dense
from services.worker.slots.table import SlotTable
from services.worker.speculation.drafter import RecordedStep
from shared.model_folder import EMBEDDED_MODEL, weight_files
from shared.wire.messages import SamplingParams
from tests.services.worker.speculation import (
    engine_of,
    params_of,
    plain,
    prompts,
)

ENGINES_AND_NUMS = [
    ("native", 4),
    pytest.param("device", 2, marks=pytest.mark.slow),
    pytest.param("torch", 6, marks=pytest.mark.slow),
    pytest.param("device", 6, marks=pytest.mark.slow),
]


def some_prompts(num: int) -> list[list[int]]:
    """Half of them short, half long."""
    middle = len(prompts()) // 2
    return prompts()[middle - num // 2 : middle + num // 2]


def same_drafts(one: Run, other: Run) -> bool:
    """True if the same drafts were verified and the same number accepted."""
    return one.verified == other.verified


@pytest.mark.parametrize(("kernels", "num"), ENGINES_AND_NUMS)
def test_drafts_are_the_same_whether_a_prompt_is_cached_or_not(kernels: str, num: int) -> None:
    """The head's KV is stored in the blocks: every hit, even of a whole prompt, includes it."""
    some = some_prompts(num)
    twice = [each for prompt in some for each in (prompt, prompt)]
    talk = [[*prompt, 262, 14, 201] for prompt in some]
    params = SamplingParams(seed=3, temperature=0.0, max_tokens=12, ignore_eos=True)
    engine = engine_of(kernels, "mtp", 3)
    cached = scheduled.run(engine, twice + talk, params, caches_prefixes=True, max_open=1)
    computed = scheduled.run(engine, twice + talk, params, max_open=1)
    assert cached.num_hits > num
    assert cached.texts == computed.texts
    assert same_drafts(cached, computed)
    assert cached.num_accepted > 0


@pytest.mark.parametrize(("kernels", "num"), ENGINES_AND_NUMS)
def test_drafts_are_the_same_however_a_prompt_is_cut(kernels: str, num: int) -> None:
    params = SamplingParams(seed=3, temperature=0.0, max_tokens=12, ignore_eos=True)
    some = some_prompts(num)
    whole = scheduled.run(engine_of(kernels, "mtp", 3), some, params, max_open=1)
    cut = engine_of(kernels, "mtp", 3, max_num_batched_tokens=7)
    in_pieces = scheduled.run(cut, some, params, max_open=1)
    assert in_pieces.texts == whole.texts
    assert same_drafts(in_pieces, whole)


@pytest.mark.parametrize(
    ("kernels", "pipeline_depth", "num"),
    [
        ("native", 2, 12),
        pytest.param("native", 1, 12, marks=pytest.mark.slow),
        *(
            pytest.param(kernels, depth, 24, marks=pytest.mark.slow)
            for kernels in ("torch", "device")
            for depth in (1, 2)
        ),
    ],
)
def test_preempted_sequences_go_on_with_the_same_text(
    kernels: str, pipeline_depth: int, num: int
) -> None:
    """Blocks for two of the longest."""
    num_blocks = 256 // ENGINES[kernels]["block_size"]
    tight = engine_of(kernels, "mtp", 3, num_gpu_blocks_override=num_blocks)
    some, params = prompts()[-num:], params_of(0.7, num)
    squeezed = scheduled.run(
        tight, some, params, caches_prefixes=True, pipeline_depth=pipeline_depth, max_open=8
    )
    assert squeezed.texts == scheduled.run(plain("native"), some, params).texts
    assert squeezed.num_resumed > 0


PAUSES = ([3, 0, 0, 0, 2], [0] * 9 + [3] * 9, [1, 0])


@pytest.mark.parametrize(
    ("kernels", "num", "pauses"),
    [
        ("native", 4, PAUSES[1]),
        pytest.param("native", 4, PAUSES[0], marks=pytest.mark.slow),
        pytest.param("native", 4, PAUSES[2], marks=pytest.mark.slow),
        *(
            pytest.param(kernels, 6, pauses, marks=pytest.mark.slow)
            for kernels in ("torch", "device")
            for pauses in PAUSES
        ),
    ],
)
def test_drafts_come_back_after_a_pause_and_caches_with_gaps_do_no_harm(
    kernels: str, num: int, pauses: list[int]
) -> None:
    """The head sees the tokens since the resumption, and the last complete run of cached blocks."""
    some = some_prompts(num)
    twice = [*some, *([*prompt, 262, 14] for prompt in some), *some]
    params = SamplingParams(seed=3, temperature=0.7, max_tokens=24, ignore_eos=True)
    engine = engine_of(kernels, "mtp", 3)
    without = scheduled.run(plain("native"), twice, params)
    done = scheduled.run(
        engine, twice, params, caches_prefixes=True, max_open=min(num, 4), depths=cycle(pauses)
    )
    assert done.texts == without.texts
    assert done.num_hits > num
    assert done.num_accepted > 0


REPEATED = SamplingParams(seed=1, temperature=0.0, max_tokens=16, ignore_eos=True)


def own_engine(kernels: str) -> Any:
    """An engine a test may modify."""
    return make_engine(
        EMBEDDED_MODEL,
        kernels,
        max_model_len=160,
        max_num_seqs=8,
        speculative_config={"method": "mtp", "adaptive": False},
    )


def embeddings_of(folder: Path) -> Tensor:
    """[V, hidden] float32"""
    name = "model.embed_tokens.weight"
    (found,) = (
        tensors[name] for file in weight_files(folder) if name in (tensors := load_file(file))
    )
    return found.float()


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_draft_that_breaks_the_numbers_costs_a_step_and_not_the_request(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 777 makes activations that are not finite, and is the second draft of each row."""
    engine, some = own_engine(kernels), some_prompts(2)
    without = scheduled.run(plain("native"), some, REPEATED)
    model = engine._model
    draft = engine._drafter.draft

    def draft_777(table: SlotTable, done: RecordedStep) -> None:
        draft(table, done)
        slots = np.flatnonzero(table.num_drafts > 1)
        table.ids[slots, table.num_tokens[slots] + 1] = 777

    embeddings = embeddings_of(EMBEDDED_MODEL)
    embeddings[777] = torch.nan
    if kernels == "native":  # otherwise it reads them from the head
        for program in (model.trunk, model.draft_head._forward):
            program._structs[0].rows = embeddings.data_ptr()
    else:
        spoiled = Dense(*embeddings.shape)
        spoiled.values.copy_(embeddings)
        model.model.model.embed_tokens.weight = spoiled  # the head keeps its own
    monkeypatch.setattr(engine._drafter, "draft", draft_777)
    done = scheduled.run(engine, some, REPEATED)
    assert done.ends == without.ends
    assert done.texts == without.texts
    assert any((0, 0) in rows for rows in done.verified), "rows are computed again without drafts"


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.slow)])
def test_blocks_of_requests_that_failed_do_not_spoil_drafts(kernels: str) -> None:
    engine, some = own_engine(kernels), some_prompts(4)
    before = scheduled.run(engine, some, REPEATED)
    with pytest.MonkeyPatch.context() as patch:
        forward = engine._model.forward
        patch.setattr(engine._model, "forward", lambda *args: forward(*args) * torch.nan)
        failed = scheduled.run(engine, [(20 * prompt)[:120] for prompt in some], REPEATED)
    assert set(failed.ends) == {"error"}
    after = scheduled.run(engine, some, REPEATED)
    assert after.texts == before.texts
    assert same_drafts(after, before)
