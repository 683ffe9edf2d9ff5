"""A text that begins in the cache is the one that is computed from its first token on."""

from dataclasses import dataclass

import numpy as np
import pytest

from services.scheduler.scheduler import Scheduler
from services.worker.engine import Engine
from shared.config import EMBEDDED_MODEL
from shared.messages import Generate, SamplingParams
from shared.token_arrays import Layout
from tests.services.worker.driver import KERNELS, make_engine

PARAMS = SamplingParams(seed=0, temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=KERNELS)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Steps of 7 tokens end inside blocks; these are for two or three sequences."""
    num_blocks = 160 // KERNELS[request.param]["block_size"]
    return make_engine(
        EMBEDDED_MODEL,
        request.param,
        max_model_len=128,
        max_num_batched_tokens=7,
        num_gpu_blocks_override=num_blocks,
    )


@dataclass
class Run:
    """The texts of ``prompts``, one after another of which comes while others run."""

    texts: list[list[int]]
    num_hits: int = 0  # sequences that began in the cache
    num_resumed: int = 0  # of them, those that had been preempted


def run(engine: Engine, prompts: list[list[int]], caches_prefixes: bool) -> Run:
    core = Scheduler(100, 10, caches_prefixes)
    core.add_worker("w", engine.capacity)
    done, waiting = Run([[] for _ in prompts]), list(enumerate(prompts))
    while waiting or core.sequences:
        if waiting and len(core.sequences) < 4:
            index, prompt = waiting.pop(0)
            ids = np.array(prompt, np.int32)
            core.add(Generate(str(index), 1, 0, len(ids), PARAMS), ids, 0, float(index))
        planned = core.plan("w")
        assert planned is not None
        for row in planned.plan.admit:
            done.num_hits += row.num_cached > 0
            done.num_resumed += row.num_cached > 0 and row.num_ids > row.prompt_len
        result, arrays = engine.step(planned.plan, planned.ids)
        layout = Layout(result.rows, arrays)
        for each in core.absorb("w", result, arrays):
            ids = layout.part(each.index, each.index + 1).ids
            done.texts[int(each.sequence.request)] += ids.tolist()
    engine.reset()
    return done


def random_ids(num: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(300, 8000, (num, length)).tolist()


def test_greedy_texts_with_hits_are_those_without(engine: Engine) -> None:
    first, second = random_ids(2, 42, seed=8)
    prompts = [first, first, first[:33], [*first[:17], *second], second, [*second, 5], first[:41]]
    cached, plain = run(engine, 2 * prompts, True), run(engine, 2 * prompts, False)
    assert cached.texts == plain.texts
    assert cached.num_hits > 7
    assert cached.num_resumed > 0
    assert plain.num_hits == 0


def test_a_talk_goes_on_from_what_was_written(engine: Engine) -> None:
    prompts = random_ids(3, 30, seed=9)
    texts = run(engine, prompts, False).texts
    turns = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    talks = [each for talk in zip(prompts, turns, strict=True) for each in talk]
    cached = run(engine, talks, True)
    assert cached.texts == run(engine, talks, False).texts
    assert cached.num_hits > 0
