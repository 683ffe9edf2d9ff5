"""Repetitive outputs end at the first repetition, in any batch and with drafts."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, make_engine
from services.worker.repetition.repetitions import repeats
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import Repetition, SamplingParams
from tests.selection import only
from tests.services.worker.driver import Driver, Job
from tests.services.worker.speculation import engine_of, plain, prompts

PARAMS = SamplingParams(seed=3, temperature=20.0, max_tokens=40, allowed_token_ids=[300, 301, 302])
RULE = Repetition(max_pattern_size=9, min_pattern_size=2, min_count=3)


def is_repetition(ids: list[int], rule: Repetition) -> bool:
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        pattern = ids[-size:]
        if len(pattern) == size and ids[-size * rule.min_count :] == pattern * rule.min_count:
            return True
    return False


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(2, 4),
)
def test_a_repetition_is_a_pattern_so_many_times_at_the_end(
    ids: list[int], longest: int, shortest: int, count: int
) -> None:
    rule = Repetition(max(longest, shortest), min(longest, shortest), count)
    for end in range(1, len(ids) + 1):
        found = repeats(np.array(ids[:end], np.int32), rule)
        assert found == is_repetition(ids[:end], rule)


def expected(text: list[int], rule: Repetition, min_tokens: int = 0) -> tuple[list[int], str]:
    """The truncated form of an output written without the rule, and its finish reason."""
    for end in range(max(1, min_tokens), len(text)):
        if is_repetition(text[:end], rule):
            return text[:end], "repetition"
    return text, "length"


def with_rule(params: SamplingParams, **more: int) -> SamplingParams:
    return msgspec.structs.replace(params, repetition=RULE, **more)


@pytest.mark.parametrize("kernels", only([("native",)], ENGINES))
def test_a_text_ends_with_its_first_repetition_in_any_batch_and_when_it_is_resumed(
    kernels: str,
) -> None:
    engine = make_engine(EMBEDDED_MODEL, kernels, max_model_len=160, max_num_seqs=16)
    asked = [msgspec.structs.replace(PARAMS, seed=seed) for seed in range(6)]
    some = prompts()[:6]
    whole = Driver(engine).run([Job(*each) for each in zip(some, asked, strict=True)])
    engine.reset()
    jobs = [Job(prompt, with_rule(each)) for prompt, each in zip(some, asked, strict=True)]
    others = [Job(*each) for each in zip(some, asked, strict=True)]
    Driver(engine, chunk_sizes=(5, 30), seed=2).run(jobs + others)
    cut = [expected(text, RULE) for text in whole]
    assert [(job.emitted, job.end and job.end.finish) for job in jobs] == cut
    assert {finish for _, finish in cut} == {"length", "repetition"}
    assert [job.emitted for job in others] == whole
    engine.reset()
    later = [
        Job(job.prompt, with_rule(job.params, min_tokens=min_tokens), emitted=whole[index][:known])
        for index, job in enumerate(jobs)
        for known, min_tokens in ((len(job.emitted) - 1, 0), (0, len(job.emitted) + 3))
        if job.end and job.end.finish == "repetition"
    ][:16]
    Driver(engine).run(later)
    for job in later:
        (text,) = (text for text, prompt in zip(whole, some, strict=True) if prompt == job.prompt)
        assert (job.emitted, job.end and job.end.finish) == expected(
            text, RULE, job.params.min_tokens
        )


@pytest.mark.parametrize(
    ("kernels", "method"),
    [("native", "mtp"), pytest.param("torch", "ngram", marks=pytest.mark.slow)],
)
def test_with_drafts_nothing_behind_the_end_is_emitted(kernels: str, method: str) -> None:
    params = [with_rule(PARAMS, seed=seed) for seed in range(8)]
    some = prompts()[:8]
    without = scheduled.run(plain("native"), some, params)
    drafted = scheduled.run(engine_of(kernels, method, 3), some, params)
    assert drafted.texts == without.texts
    assert drafted.ends == without.ends
    assert "repetition" in drafted.ends
    assert drafted.num_accepted > 0
