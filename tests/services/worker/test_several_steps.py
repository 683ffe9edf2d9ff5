"""A plan of several steps equals as many plans of one step, with every option, and computes no step
for an ended sequence."""

from functools import cache
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.harness import scheduled
from benchmarks.harness.engines import KERNELS, AnyEngine, make_engine
from benchmarks.harness.scheduled import Run
from benchmarks.harness.step_engine import run_step
from services.worker.engine.host import HostEngine
from services.worker.startup.implementations import PARTS
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import (
    ALL_TOKENS,
    Admit,
    Decode,
    Guide,
    Prefill,
    Repetition,
    SamplingParams,
    StepPlan,
    StepResult,
)
from shared.wire.token_arrays import Layout
from tests.services.worker.grammars import GRAMMARS, encode
from tests.services.worker.speculation import engine_of, params_of, prompts

NUM = 13
NUMS_OF_STEPS = (3, HostEngine.max_num_steps)
NO_IDS = np.zeros(0, np.int32)
RULES: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3, "logprobs": 5},
    {"logit_bias": [(262, 4.0), (201, -100.0)]},
    {"bad_words": [[14], [223, 25]], "min_tokens": 20},
    {"top_k": 5, "logprobs": 0, "draft_logprobs": True},
    {"top_p": 0.6, "logprobs": ALL_TOKENS},
    {"min_p": 0.2, "prompt_logprobs": 2},
    {"stop_token_ids": [14, 201], "logprob_token_ids": [5, 4, 90]},
    {"ignore_eos": True, "max_tokens": None},
    {"allowed_token_ids": list(range(200, 1200))},
    {"guide": Guide(GRAMMARS["schema"])},
    {"guide": Guide(GRAMMARS["Lark"]), "logprobs": 1, "stop_token_ids": encode(")")},
    {"repetition": Repetition(8, 1, 2), "temperature": 0.0, "max_tokens": None},
)


def asked() -> list[SamplingParams]:
    """Different parameters for each request."""
    every = zip(params_of(0.7, NUM), RULES, strict=True)
    return [msgspec.structs.replace(each, **rules) for each, rules in every]


def engine(kernels: str, method: str) -> AnyEngine:
    return engine_of(kernels, method, 0 if method == "none" else 3)


@cache
def single_steps(kernels: str, method: str) -> Run:
    return run(kernels, method, 1)


def run(kernels: str, method: str, num_steps: int, **options: Any) -> Run:
    own, some = engine(kernels, method), prompts()[:NUM]
    for params in asked():
        if params.guide is not None and "guides" in PARTS:
            # No output waits for it, so that steps are the same.
            guides: Any = own._slots._guides
            guides.grammars.compile(params.guide.grammar).future.result(60)
    return scheduled.run(own, some, asked(), num_steps=num_steps, **options)


@pytest.mark.parametrize(
    ("kernels", "method", "num_steps"),
    [
        ("native", "mtp", NUMS_OF_STEPS[-1]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("native", "none", NUMS_OF_STEPS[-1]),
                ("native", "ngram", NUMS_OF_STEPS[-1]),
                ("native", "mtp", NUMS_OF_STEPS[0]),
                ("torch", "none", NUMS_OF_STEPS[-1]),
                *product(["torch"], ["none", "mtp"], NUMS_OF_STEPS[:-1]),
            )
        ),
    ],
)
def test_all_that_comes_of_a_sequence_is_the_same(
    kernels: str, method: str, num_steps: int
) -> None:
    single = single_steps(kernels, method)
    several = run(kernels, method, num_steps)
    assert several.num_long_plans > 0
    assert single.num_long_plans == 0
    assert several.texts == single.texts
    assert several.ends == single.ends
    assert set(single.ends) == {"stop", "length", "repetition"}
    assert several.verified == single.verified
    assert (several.num_accepted > 0) == (method != "none")
    for one, other in zip(several.logprobs, single.logprobs, strict=True):
        assert [each.tobytes() for each in one] == [each.tobytes() for each in other]
    assert _told_drafts(several) == _told_drafts(single)


def _told_drafts(done: Run) -> Any:
    return [
        [(row.run, [array.tolist() for array in arrays]) for row, arrays in parts]
        for parts in done.drafts
    ]


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("method", ["none", "mtp"])
def test_texts_are_the_same_where_sequences_come_and_go(method: str, pipeline_depth: int) -> None:
    """Chunks of prompts, decoding and preemption alternate with plans of several steps."""
    tight = make_engine(
        EMBEDDED_MODEL,
        "native",
        num_gpu_blocks_override=13,
        max_num_batched_tokens=20,
        max_model_len=160,
        max_num_seqs=32,
        speculative_config={"method": method, "adaptive": False},
    )
    some, params = prompts()[-8:], params_of(0.7, 8)
    options: dict[str, Any] = {"caches_prefixes": True, "pipeline_depth": pipeline_depth}
    wanted = scheduled.run(engine("native", "none"), some, params, num_steps=1)
    found = scheduled.run(tight, some, params, num_steps=4, max_open=4, **options)
    assert found.texts == wanted.texts
    assert found.num_long_plans > 0
    assert found.num_readmitted > 0


def decoded(own: AnyEngine, max_tokens: list[int], num_steps: int) -> tuple[StepResult, Layout]:
    """The results of a plan of ``num_steps`` for sequences with one token each."""
    own.reset()
    size = own.capacity.max_model_len // own.capacity.block_size
    admits = [
        Admit(
            *(slot, f"r{slot}", 1, -slot % 3, 0, 4, 4, 0),
            SamplingParams(seed=0, temperature=0.0, max_tokens=most, ignore_eos=True),
            list(range(slot * size, slot * size + size)),
        )
        for slot, most in enumerate(max_tokens)
    ]
    slots = range(len(admits))
    ids = np.arange(10, 10 + 4 * len(admits), dtype=np.int32)
    run_step(own, StepPlan(1, [], admits, [], [Prefill(slot, 4) for slot in slots], []), ids)
    rows = [Decode(slot) for slot in slots]
    result, arrays = run_step(own, StepPlan(2, [], [], [], [], rows, 0, num_steps), NO_IDS)
    return result, Layout(result.rows, arrays)


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_of_a_slot_stand_side_by_side_and_end_with_it(kernels: str) -> None:
    own = engine(kernels, "none")
    max_tokens = [5, 3, 9, 2]
    result, layout = decoded(own, max_tokens, 4)
    slots = [0, 0, 0, 0, 3, 2, 2, 2, 2, 1, 1]  # routes 0, 0, 1, 2; one token came before
    assert [row.slot for row in result.rows] == slots
    assert result.num_steps == 4
    ends = {row.slot: index for index, row in enumerate(result.rows) if row.finish == "length"}
    assert ends == {0: 3, 3: 4, 1: 10}
    for slot, most in enumerate(max_tokens):
        alone, own_layout = decoded(own, [*max_tokens[:slot], most], 1)
        first = next(index for index, row in enumerate(alone.rows) if row.slot == slot)
        at = slots.index(slot)
        assert layout.part(at, at + 1).ids == own_layout.part(first, first + 1).ids


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_plan_ends_with_its_last_sequence(kernels: str) -> None:
    result, _ = decoded(engine(kernels, "none"), [3, 4], HostEngine.max_num_steps)
    assert result.num_steps == 3
    assert len(result.rows) == 2 + 3
    again, _ = run_step(
        engine(kernels, "none"), StepPlan(3, [], [], [], [], [Decode(0)], 0, 2), NO_IDS
    )
    assert (again.rows, again.num_steps) == ([], 1)
