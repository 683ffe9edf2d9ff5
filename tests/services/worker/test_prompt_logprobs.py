"""Prompt logprobs are the model's, for any division into steps and shared by any sequences."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from transformers import Qwen2ForCausalLM

from benchmarks.harness.engines import ENGINES, AnyEngine, make_engine
from benchmarks.harness.oracle import true_logits
from benchmarks.harness.step_engine import run_step
from kernels.logprobs.reference import logprobs_row
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival
from services.worker.step import logprobs
from shared.wire.messages import ALL_TOKENS, Generate, NewSequence, RunKind, SamplingParams
from shared.wire.token_arrays import Layout, TokenArrays, join
from tests.selection import only
from tests.services.worker.checkpoints import VOCAB_SIZE, random_prompts
from tests.services.worker.driver import Driver, Job, model_of

TOLERANCE = 1e-3  # of logprobs in float32
STEP_S = 0.002


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> AnyEngine:
    return make_engine(checkpoint, request.param)


def asking(num: int, max_tokens: int = 3) -> SamplingParams:
    return SamplingParams(0, 0.0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=num)


def prompt_logprobs_of(job: Job) -> TokenArrays:
    """All results of its prompt, joined."""
    return join([part for _, part in job.prompt_parts])


def assert_true(oracle: Qwen2ForCausalLM, job: Job) -> None:
    """The logprobs equal transformers' and the reference's, for all unscored tokens."""
    ids, num = job.prompt[1:], job.params.prompt_logprobs
    num_top = VOCAB_SIZE if num in (None, ALL_TOKENS) else num
    got, first = prompt_logprobs_of(job), job.num_prompt_scored
    assert got.ids.tolist() == ids[first:]
    values = got.values.reshape(len(ids) - first, 1 + num_top)
    top_ids = got.top_ids.reshape(len(ids) - first, 0 if num == ALL_TOKENS else num_top)
    for index, logits in enumerate(true_logits(oracle, job.prompt)[first:-1]):
        own, rank, others, likeliest = logprobs_row(
            logits, ids[first + index], None if num == ALL_TOKENS else num_top
        )
        assert np.allclose(values[index], [own, *others], atol=TOLERANCE)
        assert got.ranks[index] == rank
        assert top_ids[index].tolist() == likeliest


@pytest.mark.parametrize(
    ("chunk_sizes", "num"),
    only(
        [([1000], 0), ([1], 4), ([3, 7, 1, 5], ALL_TOKENS)],
        [[1000], [1], [3, 7, 1, 5]],
        [0, 4, ALL_TOKENS],
    ),
)
def test_they_are_the_models_in_any_chunks(
    engine: AnyEngine, oracle: Qwen2ForCausalLM, chunk_sizes: list[int], num: int
) -> None:
    jobs = [Job(prompt, asking(num)) for prompt in random_prompts(8)[1:]]
    Driver(engine, chunk_sizes, seed=num + 2).run(jobs)
    for job in jobs:
        assert_true(oracle, job)


def test_no_more_logits_exist_at_once_than_may_be_worked_on(
    engine: AnyEngine, oracle: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "MAX_LOGITS_AT_ONCE", 5 * VOCAB_SIZE)
    model = model_of(engine)
    sizes, head = [], model.logits

    def noted(hidden: Any) -> Any:
        sizes.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(model, "logits", noted)
    jobs = [Job(prompt, asking(2, max_tokens=0)) for prompt in random_prompts(6, seed=4)]
    Driver(engine).run(jobs)
    for job in jobs[1:]:
        assert_true(oracle, job)
    assert max(sizes) == 5


def test_prompt_logprobs_of_one_sequence_do_not_change_the_others(engine: AnyEngine) -> None:
    prompts = random_prompts(9, seed=5)
    plain = SamplingParams(0, 0.0, max_tokens=6, logprobs=2)
    alone = [Job(prompt, plain) for prompt in prompts]
    texts = Driver(engine, [6]).run(alone)
    mixed = [
        Job(prompt, asking(3, 6) if index % 3 == 0 else plain)
        for index, prompt in enumerate(prompts)
    ]
    assert [text for index, text in enumerate(Driver(engine, [6], 1).run(mixed)) if index % 3] == [
        text for index, text in enumerate(texts) if index % 3
    ]
    for index in (1, 2, 4, 5, 7, 8):
        assert np.allclose(mixed[index].logprobs, alone[index].logprobs, atol=TOLERANCE)
        assert mixed[index].prompt_parts == []


def test_known_prompt_logprobs_are_not_sent_again(
    engine: AnyEngine, oracle: Qwen2ForCausalLM
) -> None:
    prompts = [prompt for prompt in random_prompts(12, seed=6) if len(prompt) > 5]
    texts = Driver(engine).run([Job(prompt, asking(2)) for prompt in prompts])
    resumed = [
        Job(prompt, asking(2), num_prompt_scored=number % len(prompt), emitted=[])
        for number, prompt in enumerate(prompts)
    ]
    emitting = [
        Job(prompt, asking(2), num_prompt_scored=len(prompt) - 1, emitted=text[:1])
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    assert Driver(engine, [4], seed=1).run(resumed) == texts
    assert Driver(engine, [4], seed=2).run(emitting) == texts
    for job in resumed:
        if job.num_prompt_scored < len(job.prompt) - 1:
            assert_true(oracle, job)
    assert all(job.prompt_parts == [] for job in emitting)


def test_scoring_samples_nothing_and_ends_with_the_prompt(
    engine: AnyEngine, oracle: Qwen2ForCausalLM
) -> None:
    prompts = random_prompts(6, seed=7)
    silent = SamplingParams(0, max_tokens=0)
    jobs = [Job(prompt, asking(1, max_tokens=0)) for prompt in prompts]
    jobs += [Job(prompt, silent) for prompt in prompts]
    assert Driver(engine, [5, 9]).run(jobs) == [[]] * len(jobs)
    assert engine.num_running == 0
    for job in jobs:
        assert job.end is not None
        assert (job.end.finish, job.end.run.kind) == ("length", RunKind.PROMPT)
        if len(job.prompt) > 1 and job.params is not silent:
            assert_true(oracle, job)
        else:
            assert sum(row.run.num_tokens for row, _ in job.prompt_parts) == 0


def test_a_text_scored_as_a_prompt_has_the_logprobs_it_was_written_with(engine: AnyEngine) -> None:
    params = SamplingParams(5, 0.9, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    written = [Job(prompt, params) for prompt in random_prompts(5, seed=8)]
    Driver(engine, [7]).run(written)
    scored = [Job(job.prompt + job.emitted, asking(3, max_tokens=0)) for job in written]
    Driver(engine, [11], seed=3).run(scored)
    for job, score in zip(written, scored, strict=True):
        of_prompt = [part.values for _, part in job.prompt_parts]
        assert np.allclose(
            np.concatenate([*of_prompt, *job.logprobs]),
            prompt_logprobs_of(score).values,
            atol=TOLERANCE,
        )


def test_a_prompt_is_scored_even_where_no_token_can_follow_it(
    engine: AnyEngine, oracle: Qwen2ForCausalLM
) -> None:
    (prompt,) = random_prompts(4)[3:]
    params = SamplingParams(0, 0.0, prompt_logprobs=2, allowed_token_ids=[5], bad_words=[[5]])
    job = Job(prompt, params)
    Driver(engine).run([job])
    assert job.end is not None
    assert job.end.error is not None
    assert_true(oracle, job)


def test_logits_that_are_no_numbers_fail_their_prompt_alone(
    engine: AnyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(engine)
    head = model.logits

    def broken(*arguments: Any) -> Any:
        logits = head(*arguments)
        logits[logits.isfinite().all(-1) & (len(logits) == 6)] = float("nan")
        return logits

    monkeypatch.setattr(model, "logits", broken)
    bad, good = [9] * 7, [9] * 9
    jobs = [Job(bad, asking(1)), Job(good, asking(1)), Job(bad, asking(1, max_tokens=0))]
    Driver(engine).run(jobs)
    for job in (jobs[0], jobs[2]):
        assert job.end is not None
        assert "not finite" in str(job.end.error)
        assert job.emitted == []
    assert len(jobs[1].emitted) == 3


def run_scheduled(engine: AnyEngine, core: Scheduler, jobs: list[Job]) -> None:
    """Three choices of each of ``jobs``, the first with prompt logprobs, all at once. All steps
    last as long, so that plans are the same on a busy machine."""
    core.add_worker("w", engine.capacity)
    for number, job in enumerate(jobs):
        ids = np.array(job.prompt, np.int32)
        choices = [NewSequence(f"{number}/{choice}", choice) for choice in range(3)]
        generate = Generate(str(number), 1, job.params, choices)
        core.add(Arrival(generate, ids, ids[:0], 0, 0.0))
    while core.sequences:
        planned = core.plan("w")
        assert planned is not None
        result, arrays = run_step(engine, planned.plan, planned.ids)
        result = replace(result, step_s=STEP_S)
        layout = Layout(result.rows, arrays)
        for each in core.absorb("w", result, arrays):
            if each.row.run.kind == RunKind.PROMPT:
                number, choice = map(int, each.sequence.request.split("/"))
                assert choice == 0
                part = layout.part(each.index, each.index + 1)
                jobs[number].prompt_parts.append((each.row, part))


@pytest.mark.parametrize("caches_prefixes", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_prompt_that_was_preempted_is_scored_once(
    checkpoint: Path, oracle: Qwen2ForCausalLM, caches_prefixes: bool
) -> None:
    engine = make_engine(checkpoint, max_num_batched_tokens=9, num_gpu_blocks_override=40)
    first, *others = [ids for ids in random_prompts(14, seed=10) if len(ids) > 12]
    prompts = [first, first, [*first[:9], *others[0]], *others]
    jobs = [Job(prompt, asking(3, max_tokens=12)) for prompt in prompts]
    core = Scheduler(100, 10, caches_prefixes)
    run_scheduled(engine, core, jobs)
    for job in jobs:
        assert_true(oracle, job)
    assert core.planner.preemption.num > 0
    if caches_prefixes:
        assert core.num_prefix_hits > 0
