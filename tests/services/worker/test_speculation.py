"""Drafts of any kind do not change the output, with any other options."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.harness import scheduled
from shared.wire.messages import SamplingParams
from tests.services.worker.speculation import (
    METHODS,
    engine_of,
    iter_positions,
    params_of,
    plain,
    prompts,
    without_drafts,
)

TEMPERATURES = (0.0, 0.7, 1.0)
RULES: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3},
    {"logit_bias": [(262, 4.0), (201, -100.0)]},
    {"bad_words": [[14], [223, 25]], "min_tokens": 20},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_n_sigma": 1.5},
    {"stop_token_ids": [14, 201]},
    {"ignore_eos": True},
    {"allowed_token_ids": list(range(200, 1200))},
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", [("native", 1), ("native", 3), ("torch", 2)], ids=str)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_texts_match_runs_without_drafts(
    temperature: float, engine: tuple[str, int], method: str
) -> None:
    """All at once; drafts of all rows are verified in one step."""
    kernels, depth = engine
    num = 32 if kernels == "native" else 4
    many, params = (2 * prompts())[:num], params_of(temperature, num)
    with_drafts = scheduled.run(engine_of(kernels, method, depth), many, params)
    without = without_drafts(temperature)
    assert with_drafts.texts == without.texts[:num]
    assert with_drafts.ends == without.ends[:num]
    assert with_drafts.num_accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_alone_the_texts_are_the_same_too(temperature: float, depth: int, method: str) -> None:
    """Some of those written at once, short and long."""
    some, params = prompts()[::8], params_of(temperature, 24)[::8]
    alone = scheduled.run(engine_of("native", method, depth), some, params, max_open=1)
    assert alone.texts == without_drafts(temperature).texts[:24:8]


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(RULES, id="each request another"),
        *(pytest.param([each], id=next(iter(each)), marks=pytest.mark.slow) for each in RULES),
    ],
)
def test_sampling_rules_hold_for_each_token_of_a_run(rules: Sequence[dict[str, Any]]) -> None:
    some = prompts()[::2]
    params = [
        msgspec.structs.replace(each, **asked)
        for each, asked in zip(params_of(0.7, len(some)), cycle(rules), strict=False)
    ]
    with_drafts = scheduled.run(engine_of("native", "mtp", 3), some, params)
    without = scheduled.run(plain("native"), some, params)
    assert with_drafts.texts == without.texts
    assert with_drafts.ends == without.ends
    assert with_drafts.num_accepted > 0


@pytest.mark.parametrize(
    ("kernels", "num"),
    [
        ("native", 8),
        pytest.param("device", 2, marks=pytest.mark.slow),
        pytest.param("torch", 24, marks=pytest.mark.slow),
        pytest.param("device", 24, marks=pytest.mark.slow),
    ],
)
def test_every_emitted_token_has_its_logprobs(kernels: str, num: int) -> None:
    some, params = prompts()[:: 24 // num], params_of(0.7, num, logprobs=4)
    with_drafts = scheduled.run(engine_of(kernels, "mtp", 3), some, params)
    without = scheduled.run(plain("native"), some, params)
    assert with_drafts.texts == without.texts
    for one, other in zip(with_drafts.logprobs, without.logprobs, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-3)


@pytest.mark.parametrize("method", ["mtp", pytest.param("ngram", marks=pytest.mark.slow)])
def test_the_context_is_filled_to_its_last_position(method: str) -> None:
    params = SamplingParams(seed=1, temperature=0.0, ignore_eos=True)
    long = [each for each in prompts() if len(each) > 40][::6]
    full = scheduled.run(engine_of("native", method, 5), long, params)
    assert full.texts == scheduled.run(plain("native"), long, params).texts
    assert {len(p) + len(t) for p, t in zip(long, full.texts, strict=True)} == {160}


@pytest.mark.parametrize(
    "max_tokens",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
def test_few_tokens_are_not_more_with_drafts(max_tokens: int) -> None:
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    few = scheduled.run(engine_of("native", "mtp", 5), prompts(), params)
    assert few.texts == scheduled.run(plain("native"), prompts(), params).texts
    assert {len(text) for text in few.texts} == {max_tokens}


def test_drafts_with_logprobs_are_the_verified_ones() -> None:
    params = params_of(0.7, 6, logprobs=0, draft_logprobs=True)
    done = scheduled.run(engine_of("native", "mtp", 3), prompts()[::4], params)
    for text, verified, drafts in zip(done.texts, done.verified, done.drafts, strict=True):
        assert [row.run.num_tokens for row, _ in drafts] == [num for num, _ in verified if num]
        at = iter_positions(verified)
        for (row, part), position in zip(drafts, at, strict=True):
            right = part.ids[: row.run.num_accepted].tolist()
            assert right == text[position : position + row.run.num_accepted]
            assert (part.values <= 0).all()
            assert (part.ranks >= 1).all()
