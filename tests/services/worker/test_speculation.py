"""With drafts the text is what it is without, however they are made and whatever else is asked."""

from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, KERNELS, make_engine
from benchmarks.harness.scheduled import Run
from services.worker.engine.host import HostEngine
from services.worker.slots.table import SlotTable
from services.worker.speculation.drafter import RecordedStep
from shared.messages import SamplingParams
from shared.model_folder import EMBEDDED_MODEL

BEGINNINGS = (
    "import os\nimport sys\n\n\nclass Server:\n    def __init__(self, ",
    "def main():\n    parser = argparse.",
    '"""Utilities for ',
    "    for i in range(len(",
    "# Copyright (c) 2001\n\nfrom __future__ import annotations\n\n",
    "    def test_one(self):\n        self.assertEqual(",
    "try:\n    import ",
    "    raise ValueError('",
    "The quick brown fox",
    "if __name__ == '__main__':\n",
    "    @property\n    def name(self):\n        return self.",
    "x = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4, 5, 6",
)
METHODS = ("mtp", "ngram")


@cache
def prompts() -> list[list[int]]:
    """24 of 1 … 80 ids: some fill blocks, some do not."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    short = [tokenizer.encode(text).ids for text in BEGINNINGS]
    long = [(3 * one + other)[-80:] for one, other in zip(short, reversed(short), strict=True)]
    return [short[0][:1], *short[1:], *long]


@cache
def engine_of(kernels: str, method: str, depth: int, **settings: Any) -> HostEngine:
    speculation = {"method": method, "num_speculative_tokens": depth or None, "adaptive": False}
    return make_engine(
        EMBEDDED_MODEL,
        kernels,
        speculative_config=speculation,
        max_model_len=160,
        max_num_seqs=32,
        **settings,
    )


def plain(kernels: str, **settings: Any) -> HostEngine:
    return engine_of(kernels, "none", 0, **settings)


def params_of(temperature: float, num: int, **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(seed=7 * i - 5, temperature=temperature, max_tokens=40, **more)
        for i in range(num)
    ]


@pytest.mark.parametrize(
    ("kernels", "depth"), [("native", 1), ("native", 3), ("torch", 2)], ids=str
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_texts_are_those_without_drafts(
    kernels: str, method: str, temperature: float, depth: int
) -> None:
    """32 at once, whose drafts, if any, are verified in one step."""
    many = (prompts() * 2)[:32]
    params = params_of(temperature, 32)
    with_drafts = scheduled.run(engine_of(kernels, method, depth), many, params)
    without = scheduled.run(plain(kernels), many, params)
    assert with_drafts.texts == without.texts
    assert with_drafts.ends == without.ends
    assert with_drafts.num_accepted > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("depth", [1, 3])
def test_alone_the_texts_are_the_same_too(method: str, temperature: float, depth: int) -> None:
    params = params_of(temperature, 24)
    without = scheduled.run(plain("native"), prompts(), params)
    alone = scheduled.run(engine_of("native", method, depth), prompts(), params, max_open=1)
    assert alone.texts == without.texts


@pytest.mark.parametrize(
    "rules",
    [
        {"presence_penalty": 0.8, "frequency_penalty": 0.4},
        {"repetition_penalty": 1.3},
        {"logit_bias": [(262, 4.0), (201, -100.0)]},
        {"bad_words": [[14], [223, 25]], "min_tokens": 20},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"stop_token_ids": [14, 201]},
        {"ignore_eos": True},
        {"allowed_token_ids": list(range(200, 1200))},
    ],
    ids=lambda rules: next(iter(rules)),
)
def test_what_else_is_asked_holds_for_each_token_of_a_run(rules: dict[str, Any]) -> None:
    params = params_of(0.7, 24, **rules)
    with_drafts = scheduled.run(engine_of("native", "mtp", 3), prompts(), params)
    without = scheduled.run(plain("native"), prompts(), params)
    assert with_drafts.texts == without.texts
    assert with_drafts.ends == without.ends
    assert with_drafts.num_accepted > 0


@pytest.mark.parametrize("kernels", ENGINES)
def test_every_emitted_token_has_its_logprobs(kernels: str) -> None:
    params = params_of(0.7, 24, logprobs=4)
    with_drafts = scheduled.run(engine_of(kernels, "mtp", 3), prompts(), params)
    without = scheduled.run(plain(kernels), prompts(), params)
    assert with_drafts.texts == without.texts
    for one, other in zip(with_drafts.logprobs, without.logprobs, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-3)


def same_drafts(one: Run, other: Run) -> bool:
    """Whether the same drafts were verified, of which as many were right."""
    return one.verified == other.verified


@pytest.mark.parametrize("kernels", ENGINES)
def test_drafts_are_the_same_whether_a_prompt_is_cached_or_not(kernels: str) -> None:
    """The head's KV lies with the blocks: no hit, not even of a whole prompt, lacks any of it."""
    some = prompts()[9:15]
    twice = [each for prompt in some for each in (prompt, prompt)]
    talk = [[*prompt, 262, 14, 201] for prompt in some]
    params = SamplingParams(seed=3, temperature=0.0, max_tokens=24, ignore_eos=True)
    engine = engine_of(kernels, "mtp", 3)
    cached = scheduled.run(engine, twice + talk, params, caches_prefixes=True, max_open=1)
    computed = scheduled.run(engine, twice + talk, params, max_open=1)
    assert cached.num_hits > 6
    assert cached.texts == computed.texts
    assert same_drafts(cached, computed)
    assert cached.num_accepted > 0


@pytest.mark.parametrize("kernels", ENGINES)
def test_drafts_are_the_same_however_a_prompt_is_cut(kernels: str) -> None:
    params = SamplingParams(seed=3, temperature=0.0, max_tokens=24, ignore_eos=True)
    some = prompts()[9:15]
    whole = scheduled.run(engine_of(kernels, "mtp", 3), some, params, max_open=1)
    cut = engine_of(kernels, "mtp", 3, max_num_batched_tokens=7)
    in_pieces = scheduled.run(cut, some, params, max_open=1)
    assert in_pieces.texts == whole.texts
    assert same_drafts(in_pieces, whole)


@pytest.mark.parametrize(
    ("kernels", "pipeline_depth"),
    [
        *((kernels, depth) for kernels in KERNELS for depth in (1, 2)),
        ("device", 2),
        pytest.param("device", 1, marks=pytest.mark.slow),
    ],
)
def test_preempted_sequences_go_on_with_the_same_text(kernels: str, pipeline_depth: int) -> None:
    """Blocks for two or three of the longest."""
    num_blocks = 400 // ENGINES[kernels]["block_size"]
    tight = engine_of(kernels, "mtp", 3, num_gpu_blocks_override=num_blocks)
    params = params_of(0.7, 24)
    squeezed = scheduled.run(
        tight, prompts(), params, caches_prefixes=True, pipeline_depth=pipeline_depth, max_open=8
    )
    assert squeezed.texts == scheduled.run(plain(kernels), prompts(), params).texts
    assert squeezed.num_resumed > 0


PAUSES = ([3, 0, 0, 0, 2], [0] * 9 + [3] * 9, [1, 0])


@pytest.mark.parametrize(
    ("kernels", "all_pauses"),
    [
        *((kernels, PAUSES) for kernels in KERNELS),
        ("device", PAUSES[:1]),
        pytest.param("device", PAUSES[1:], marks=pytest.mark.slow),
    ],
)
def test_drafts_come_back_after_a_pause_and_caches_with_gaps_do_no_harm(
    kernels: str, all_pauses: tuple[list[int], ...]
) -> None:
    """The head sees what it has of a text since it went on, and of cached blocks the last ones that
    it has as a whole."""
    some = prompts()[9:15]
    twice = [*some, *([*prompt, 262, 14] for prompt in some), *some]
    params = SamplingParams(seed=3, temperature=0.7, max_tokens=40, ignore_eos=True)
    engine = engine_of(kernels, "mtp", 3)
    without = scheduled.run(plain(kernels), twice, params)
    for pauses in all_pauses:
        done = scheduled.run(
            engine, twice, params, caches_prefixes=True, max_open=4, depths=cycle(pauses)
        )
        assert done.texts == without.texts
        assert done.num_hits > 6
        assert done.num_accepted > 0


REPEATED = SamplingParams(seed=1, temperature=0.0, max_tokens=30, ignore_eos=True)


def own_engine(kernels: str) -> HostEngine:
    """Of which a test may change parts."""
    return make_engine(
        EMBEDDED_MODEL,
        kernels,
        max_model_len=160,
        max_num_seqs=8,
        speculative_config={"method": "mtp", "adaptive": False},
    )


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_draft_that_breaks_the_numbers_costs_a_step_and_not_the_request(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 777 makes activations that are not finite, and is the second draft of each row."""
    engine, some = own_engine(kernels), prompts()[9:15]
    without = scheduled.run(plain(kernels), some, REPEATED)
    draft, model = engine._drafter.draft, engine._model

    def draft_777(table: SlotTable, done: RecordedStep) -> None:
        draft(table, done)
        slots = np.flatnonzero(table.num_drafts > 1)
        table.ids[slots, table.num_tokens[slots] + 1] = 777

    embed = model._embed if kernels == "native" else model.model.embed_tokens.forward

    def embed_badly(ids: Tensor) -> Tensor:
        return embed(ids).clone().masked_fill_((ids == 777)[:, None], torch.nan)

    where = (model, "_embed") if kernels == "native" else (model.model.embed_tokens, "forward")
    monkeypatch.setattr(engine._drafter, "draft", draft_777)
    monkeypatch.setattr(*where, embed_badly)
    done = scheduled.run(engine, some, REPEATED)
    assert done.ends == without.ends
    assert done.texts == without.texts
    assert any((0, 0) in rows for rows in done.verified), "rows are computed again without drafts"


@pytest.mark.parametrize("kernels", KERNELS)
def test_blocks_of_requests_that_failed_do_not_spoil_drafts(kernels: str) -> None:
    engine, some = own_engine(kernels), prompts()[9:15]
    before = scheduled.run(engine, some, REPEATED)
    with pytest.MonkeyPatch.context() as patch:
        forward = engine._model.forward
        patch.setattr(engine._model, "forward", lambda *args: forward(*args) * torch.nan)
        failed = scheduled.run(engine, [(20 * prompt)[:120] for prompt in some], REPEATED)
    assert set(failed.ends) == {"error"}
    after = scheduled.run(engine, some, REPEATED)
    assert after.texts == before.texts
    assert same_drafts(after, before)


@pytest.mark.parametrize("method", METHODS)
def test_the_context_is_filled_to_its_last_position(method: str) -> None:
    params = SamplingParams(seed=1, temperature=0.0, ignore_eos=True)
    long = [each for each in prompts() if len(each) > 40]
    full = scheduled.run(engine_of("native", method, 5), long, params)
    assert full.texts == scheduled.run(plain("native"), long, params).texts
    assert {len(p) + len(t) for p, t in zip(long, full.texts, strict=True)} == {160}


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_few_tokens_are_not_more_with_drafts(max_tokens: int) -> None:
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    few = scheduled.run(engine_of("native", "mtp", 5), prompts(), params)
    assert few.texts == scheduled.run(plain("native"), prompts(), params).texts
    assert {len(text) for text in few.texts} == {max_tokens}


def test_drafts_with_logprobs_are_those_that_were_verified() -> None:
    params = params_of(0.7, 24, logprobs=0, draft_logprobs=True)
    done = scheduled.run(engine_of("native", "mtp", 3), prompts(), params)
    for text, verified, drafts in zip(done.texts, done.verified, done.drafts, strict=True):
        assert [row.run.num_tokens for row, _ in drafts] == [num for num, _ in verified if num]
        at = iter_positions(verified)
        for (row, part), position in zip(drafts, at, strict=True):
            right = part.ids[: row.run.num_accepted].tolist()
            assert right == text[position : position + row.run.num_accepted]
            assert (part.values <= 0).all()
            assert (part.ranks >= 1).all()


def iter_positions(verified: list[tuple[int, int]]) -> list[int]:
    """Where in the text the drafts of each row with drafts belong."""
    found, position = [], 0
    for num_drafts, num_accepted in verified:
        if num_drafts:
            found.append(position)
        position += num_accepted + 1
    return found
