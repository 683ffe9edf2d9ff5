"""The engine's output is the model's, for any division of the work into steps. transformers is the
oracle."""

from pathlib import Path

import pytest
from transformers import Qwen2ForCausalLM

from benchmarks.harness.engines import ENGINES, KERNELS, AnyEngine, make_engine
from shared.wire.messages import SamplingParams
from tests.services.worker.checkpoints import MAX_POSITIONS, assert_greedy, random_prompts
from tests.services.worker.driver import Driver, Job

not_on_the_device = pytest.mark.parametrize(
    "engine", [*KERNELS, pytest.param("device", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> AnyEngine:
    return make_engine(checkpoint, request.param)


def test_one_prompt_continues_as_transformers_does(
    engine: AnyEngine, oracle: Qwen2ForCausalLM
) -> None:
    (prompt,) = random_prompts(1, seed=3)
    (text,) = Driver(engine).run([Job(prompt)])
    assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize("chunk_sizes", [[1000], [13], [3, 7, 1, 5], [1]])
@pytest.mark.parametrize("engine", ["native", "torch", "device"], indirect=True)
def test_twenty_ragged_prompts_continue_as_transformers_does(
    engine: AnyEngine, oracle: Qwen2ForCausalLM, chunk_sizes: list[int]
) -> None:
    prompts = random_prompts(20)
    texts = Driver(engine, chunk_sizes, seed=len(chunk_sizes)).run([Job(p) for p in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)


@not_on_the_device
def test_slots_and_blocks_used_again_leave_no_trace(
    engine: AnyEngine, oracle: Qwen2ForCausalLM
) -> None:
    for seed in range(2):
        prompts = random_prompts(6, seed=seed)
        texts = Driver(engine, [9, 2], seed).run([Job(prompt) for prompt in prompts])
        for prompt, text in zip(prompts, texts, strict=True):
            assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_a_resumed_sequence_goes_on_as_if_never_interrupted(
    engine: AnyEngine, temperature: float
) -> None:
    params = SamplingParams(seed=-5, temperature=temperature, max_tokens=15, ignore_eos=True)
    prompts = random_prompts(5, seed=1)
    whole = Driver(engine).run([Job(prompt, params) for prompt in prompts])
    halves = [
        Job(prompt, params, emitted=text[:at])
        for at, (prompt, text) in enumerate(zip(prompts, whole, strict=True), start=1)
    ]
    assert Driver(engine, [4, 11], seed=9).run(halves) == whole


@not_on_the_device
def test_a_text_is_the_same_alone_and_in_a_batch(engine: AnyEngine) -> None:
    jobs = [
        (
            prompt,
            SamplingParams(
                seed=number * 7919 - 3,
                temperature=[0.0, 0.7, 1.0, 1.5][number % 4],
                top_k=[0, 0, 12][number % 3],
                top_p=[1.0, 0.9][number % 2],
                max_tokens=10,
            ),
            number % 2,
        )
        for number, prompt in enumerate(random_prompts(6, seed=2))
    ]
    together = Driver(engine, [5, 16]).run([Job(*job) for job in jobs])
    alone = [Driver(engine, seed=4).run([Job(*job)])[0] for job in jobs]
    assert together == alone


def test_seed_and_choice_make_another_text_and_the_same_ones_the_same(engine: AnyEngine) -> None:
    (prompt,) = random_prompts(1, seed=3)
    sampled = [SamplingParams(seed=seed, max_tokens=20, ignore_eos=True) for seed in (1, 1, 2)]
    jobs = [Job(prompt, params) for params in sampled] + [Job(prompt, sampled[0], choice=1)]
    first, same, other_seed, other_choice = Driver(engine).run(jobs)
    assert first == same
    assert len({tuple(first), tuple(other_seed), tuple(other_choice)}) == 3


def test_tokens_beyond_the_reserved_blocks_write_to_the_null_block(
    engine: AnyEngine, oracle: Qwen2ForCausalLM
) -> None:
    """A job with a short table must not disturb the owner of block 0."""
    prompts = random_prompts(2, seed=5)
    driver = Driver(engine)
    num_blocks = MAX_POSITIONS // engine.capacity.block_size
    tables: list[list[list[int]]] = [[[*range(num_blocks)]], [[]]]
    driver._tables = lambda num: tables  # type: ignore[method-assign]
    texts = driver.run([Job(prompt) for prompt in prompts])
    assert_greedy(oracle, prompts[0], texts[0])
