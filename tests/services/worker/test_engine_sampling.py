"""Sampling parameters and logprobs, from the plan to the result, against transformers."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from benchmarks.harness.engines import ENGINES, AnyEngine, make_engine
from benchmarks.harness.oracle import load_as_qwen2, true_logits
from benchmarks.harness.step_engine import run_step
from services.worker.step import logprobs
from shared.wire.messages import ALL_TOKENS, MIN_LOGPROB, Admit, Prefill, SamplingParams, StepPlan
from shared.wire.token_arrays import Layout
from tests.services.worker.checkpoints import (
    EOS_ID,
    MAX_POSITIONS,
    SETTLED,
    VOCAB_SIZE,
    random_prompts,
    save_qwen2,
)
from tests.services.worker.driver import Driver, Job

PARAMS = SamplingParams(seed=5, temperature=0.9, max_tokens=14, ignore_eos=True)
CHANGES: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.2},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.2},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": [(9, 8.0), (11, -50.0)]},
    "allowed": {"allowed_token_ids": list(range(20, 60))},
    "bad words": {"bad_words": [[52, 147], *([token] for token in range(8, 60))]},
    "min_tokens": {"min_tokens": 6, "ignore_eos": False, "logit_bias": [(EOS_ID, 9.0)]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    save_qwen2(folder, tie_word_embeddings=True)
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def shared_engine(request: pytest.FixtureRequest, folder: Path) -> AnyEngine:
    return make_engine(folder, request.param)


@pytest.fixture
def engine(shared_engine: AnyEngine) -> AnyEngine:
    shared_engine.reset()
    return shared_engine


def blocks_of(engine: AnyEngine, slot: int) -> list[int]:
    num = MAX_POSITIONS // engine.capacity.block_size
    return list(range(slot * num, slot * num + num))


def changed(**changes) -> SamplingParams:
    return msgspec.structs.replace(PARAMS, **changes)


@pytest.fixture(scope="module")
def plain(shared_engine: AnyEngine) -> list[list[int]]:
    return Driver(shared_engine).run([Job(prompt, PARAMS) for prompt in random_prompts(6)])


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("shared_engine", ["native", "torch", "device"], indirect=True)
def test_text_and_logprobs_are_the_same_whatever_the_batch_chunks_and_resumption(
    engine: AnyEngine, plain: list[list[int]], name: str
) -> None:
    params = changed(logprobs=6, **CHANGES[name])
    prompts = random_prompts(6)
    jobs = [Job(prompt, params) for prompt in prompts]
    texts = Driver(engine).run(jobs)
    assert texts != plain, "the parameter changes something"
    engine.reset()
    for job in jobs[:2]:
        alone = Job(job.prompt, params)
        Driver(engine, chunk_sizes=(3, 5)).run([alone])
        assert_equal(alone, job, 0)
        engine.reset()
    resumed = [Job(job.prompt, params, emitted=list(job.emitted[:4])) for job in jobs]
    others = [Job(prompt, changed(logprobs=ALL_TOKENS)) for prompt in prompts]
    Driver(engine, seed=3).run(resumed + others)
    for again, job in zip(resumed, jobs, strict=True):
        assert_equal(again, job, 4)


def assert_equal(again: Job, job: Job, num_known: int) -> None:
    assert again.emitted == job.emitted
    np.testing.assert_allclose(again.logprobs, job.logprobs[num_known:], atol=1e-3)


def greedy_by_transformers(
    folder: Path, processor: LogitsProcessor, prompt: list[int], num: int
) -> tuple[list[int], float]:
    """The output, and the smallest gap between the two best scores."""
    oracle, ids, gap = load_as_qwen2(folder), list(prompt), np.inf
    for _ in range(num):
        logits = torch.from_numpy(true_logits(oracle, ids)[-1:])
        scores = processor(torch.tensor([ids]), logits)[0]
        best, second = scores.topk(2).values.tolist()
        gap = min(gap, best - second)
        ids.append(int(scores.argmax()))
    return ids[len(prompt) :], gap


@pytest.mark.parametrize(
    ("changes", "processor"),
    [
        ({"repetition_penalty": 1.7}, RepetitionPenaltyLogitsProcessor(1.7)),
        ({"bad_words": [[20], [9, 31]]}, NoBadWordsLogitsProcessor([[20], [9, 31]], EOS_ID)),
    ],
)
def test_greedy_texts_match_transformers_processors(
    engine: AnyEngine, folder: Path, changes: dict, processor: LogitsProcessor
) -> None:
    prompt = random_prompts(3)[2]
    (text,) = Driver(engine).run([Job(prompt, changed(temperature=0.0, **changes))])
    expected, gap = greedy_by_transformers(folder, processor, prompt, len(text))
    assert gap > SETTLED, "choose another prompt"
    assert text == expected


def test_before_min_tokens_neither_eos_nor_stop_ids_end_a_text(engine: AnyEngine) -> None:
    bias = [(EOS_ID, 100.0)]
    params = changed(min_tokens=5, ignore_eos=False, logit_bias=bias, max_tokens=20)
    jobs = [Job(prompt, params) for prompt in random_prompts(4)]
    for text, job in zip(Driver(engine).run(jobs), jobs, strict=True):
        assert len(text) == 6
        assert text[-1] == EOS_ID
        assert job.end.finish == "stop"


def test_a_stop_id_ends_the_text_and_is_its_last(engine: AnyEngine) -> None:
    params = changed(stop_token_ids=[33, 44], logit_bias=[(44, 100.0)])
    job = Job([5, 6], params)
    assert Driver(engine).run([job]) == [[44]]
    assert job.end.finish == "stop"


def test_a_sequence_that_forbids_every_token_fails_and_no_other(engine: AnyEngine) -> None:
    filters = {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "top_n_sigma": 1.0}
    failing = Job([5, 6], changed(allowed_token_ids=[20], bad_words=[[20]], **filters))
    fine = Job([5, 6], PARAMS)
    Driver(engine).run([failing, fine])
    assert "forbids every token" in failing.end.error
    assert failing.end.code == "no_token_allowed"
    assert fine.end.finish == "length"


def step_with(engine: AnyEngine, nums: list[int | None]) -> tuple:
    """One step of a sequence for each of ``nums`` requested logprobs; routes out of order."""
    prompts = random_prompts(len(nums))
    admits = [
        Admit(
            slot, f"r{slot}", 1, -slot % 3, 0, len(prompt), len(prompt), 0,
            changed(logprobs=num), blocks_of(engine, slot),
        )
        for slot, (prompt, num) in enumerate(zip(prompts, nums, strict=True))
    ]  # fmt: skip
    prefills = [Prefill(slot, len(prompt)) for slot, prompt in enumerate(prompts)]
    ids = np.concatenate([np.array(prompt, np.int32) for prompt in prompts])
    return prompts, *run_step(engine, StepPlan(1, [], admits, [], prefills, []), ids)


@pytest.mark.parametrize("piece", [1, logprobs.MAX_LOGITS_AT_ONCE])
def test_each_row_has_its_number_of_logprobs_from_the_model(
    engine: AnyEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(logprobs, "MAX_LOGITS_AT_ONCE", piece)
    nums = [None, 0, 3, ALL_TOKENS, 5, VOCAB_SIZE, None, 3]
    prompts, result, arrays = step_with(engine, nums)
    layout, oracle = Layout(result.rows, arrays), load_as_qwen2(folder)
    for index, row in enumerate(result.rows):
        part, num = layout.part(index, index + 1), nums[row.slot]
        truth = torch.from_numpy(true_logits(oracle, prompts[row.slot])[-1]).log_softmax(-1).numpy()
        if num is None:
            assert (row.run.num_values, row.run.num_top_ids, part.num_bytes) == (0, 0, 4)
            continue
        own, *others = part.values.tolist()
        assert abs(own - truth[part.ids[0]]) < 1e-3
        assert part.ranks.tolist() == [1 + (truth > truth[part.ids[0]]).sum()]
        if num in (ALL_TOKENS, VOCAB_SIZE):
            assert (row.run.num_values, row.run.num_top_ids) == (1 + VOCAB_SIZE, 0)
            np.testing.assert_allclose(others, truth, atol=1e-3)
        else:
            assert (row.run.num_values, row.run.num_top_ids) == (1 + num, num)
            assert part.top_ids.tolist() == np.argsort(-truth)[:num].tolist()
            np.testing.assert_allclose(others, np.sort(truth)[::-1][:num], atol=1e-3)


def test_named_ids_have_the_logprobs_that_the_whole_vocabulary_has_in_any_batch(
    engine: AnyEngine,
) -> None:
    """Each sequence names other ids, and some name none."""
    ids = [[7], [9, 3, 100, 44], list(range(VOCAB_SIZE - 1, VOCAB_SIZE - 129, -1))]
    asked = [changed(logprobs=len(each), logprob_token_ids=each) for each in ids]
    prompts = random_prompts(6)
    named = [Job(prompt, each) for prompt, each in zip(prompts, asked, strict=False)]
    others = [Job(prompts[3], changed(logprobs=3)), Job(prompts[4], changed(logprobs=30))]
    Driver(engine).run([*others, *named])
    whole = [Job(job.prompt, changed(logprobs=ALL_TOKENS)) for job in named]
    Driver(engine, seed=5).run(whole)
    for job, every, each in zip(named, whole, ids, strict=True):
        assert job.emitted == every.emitted
        for found, truth in zip(job.logprobs, every.logprobs, strict=True):
            own, *values = found.tolist()
            assert own == pytest.approx(truth[0], abs=1e-4)
            expected = np.sort(truth[1:][each])[::-1]
            np.testing.assert_allclose(values, expected, atol=1e-4)
    alone = Job(named[1].prompt, asked[1])
    engine.reset()
    Driver(engine, chunk_sizes=(3, 5)).run([alone])
    np.testing.assert_allclose(alone.logprobs, named[1].logprobs, atol=1e-3)


def test_logprobs_match_the_raw_logits(engine: AnyEngine) -> None:
    _, _, first = step_with(engine, [4])
    engine.reset()
    prompts = random_prompts(1)
    params = changed(logprobs=4, logit_bias=[(50, 90.0)])
    admit = Admit(
        0, "r0", 1, 0, 0, len(prompts[0]), len(prompts[0]), 0, params, blocks_of(engine, 0)
    )
    ids = np.array(prompts[0], np.int32)
    _, second = run_step(engine, StepPlan(1, [], [admit], [], [Prefill(0, len(ids))], []), ids)
    assert second.ids.tolist() == [50]
    assert second.ranks[0] > 1
    np.testing.assert_allclose(first.values[1:], second.values[1:], atol=1e-5)


@pytest.mark.parametrize("kernels", ENGINES)
def test_processed_logprobs_match_the_scores(folder: Path, kernels: str) -> None:
    engine = make_engine(folder, kernels, logprobs_mode="processed_logprobs")
    (prompt,) = random_prompts(1)
    change = {"temperature": 0.7, "top_k": 3, "logit_bias": [(50, 4.0)]}
    params = [changed(logprobs=5, **change), changed(logprobs=5, temperature=0.0)]
    admits = [
        Admit(
            slot,
            f"r{slot}",
            1,
            0,
            0,
            len(prompt),
            len(prompt),
            0,
            each,
            blocks_of(engine, slot),
        )
        for slot, each in enumerate(params)
    ]
    plan = StepPlan(1, [], admits, [], [Prefill(slot, len(prompt)) for slot in range(2)], [])
    result, arrays = run_step(engine, plan, np.array(prompt * 2, np.int32))
    layout = Layout(result.rows, arrays)
    raw = true_logits(load_as_qwen2(folder), prompt)[-1].astype(np.float64)
    scores = raw.copy()
    scores[50] += 4.0
    scores /= 0.7
    kept = np.sort(scores)[::-1][:3]
    expected = kept - np.log(np.exp(kept - kept.max()).sum()) - kept.max()
    random, greedy = (layout.part(index, index + 1) for index in range(2))
    np.testing.assert_allclose(random.values[1:4], expected, atol=1e-3)
    assert random.values[4:].tolist() == [MIN_LOGPROB] * 2, "filtered tokens are never sampled"
    highest = np.sort(raw)[::-1][:5] - raw.max() - np.log(np.exp(raw - raw.max()).sum())
    np.testing.assert_allclose(greedy.values[1:], highest, atol=1e-3)
