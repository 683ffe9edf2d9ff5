"""Specifics of the engine for GPUs: it launches steps before earlier results are known."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import pytest

from benchmarks.harness import scheduled
from benchmarks.harness.engines import AnyEngine, make_engine
from benchmarks.harness.step_engine import run_step
from services.worker.engine.device.engine import DeviceEngine
from services.worker.engine.protocol import StepOutput
from services.worker.step.results import StepRows
from services.worker.step.step import PendingResult
from shared.errors import ConfigError
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import ALL_TOKENS, Admit, Prefill, SamplingParams, StepPlan
from tests.services.worker.checkpoints import random_prompts, save_mimo
from tests.services.worker.test_engine_contract import NO_IDS, admit, ids, plan

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

TOLERANCE = 1e-3  # of logprobs in float32
GREEDY = {"seed": 0, "temperature": 0.0, "ignore_eos": True}
Step = tuple[StepPlan, np.ndarray]


@pytest.fixture
def engine(checkpoint: Path) -> DeviceEngine:
    return make_engine(checkpoint, "device", cudagraph_capture_sizes=[1, 4])


def admitted(slot: int, num_ids: int, **rules: Any) -> Admit:
    return admit(slot, num_ids, SamplingParams(**(GREEDY | rules)))


def steps_of(**rules: Any) -> list[Step]:
    """Slot 0 has a prompt in two chunks, slot 1 one in one, and slot 2 comes later. Slots 0 and 2
    have ``rules``."""
    first = [admitted(0, 9, **rules), admitted(1, 5)]
    last = [admitted(2, 3, **rules)]
    return [
        (plan(admit=first, prefill=[Prefill(0, 4), Prefill(1, 5)]), ids(9, 5)),
        (plan(prefill=[Prefill(0, 5)], decode=[1]), NO_IDS),
        (plan(decode=[0, 1]), NO_IDS),
        (plan(admit=last, prefill=[Prefill(2, 3)], decode=[0, 1]), ids(3)),
        (plan(decode=[0, 1, 2]), NO_IDS),
    ]


def launched_ahead(engine: DeviceEngine, steps: list[Step]) -> list[StepOutput]:
    """Submits all of ``steps`` before any result is collected."""
    with held_results(engine):
        outputs = [submitted(engine, step) for step in steps]
    return [output.result() for output in outputs]


def submitted(engine: DeviceEngine, step: Step) -> Future[StepOutput]:
    output: Future[StepOutput] = Future()
    engine.submit(*step, output)
    return output


@contextmanager
def held_results(engine: DeviceEngine) -> Iterator[Event]:
    """Blocks the result thread until the event is set."""
    is_released = Event()
    engine._results.submit(is_released.wait)
    try:
        yield is_released
    finally:
        is_released.set()


def one_by_one(engine: AnyEngine, steps: list[Step]) -> list[StepOutput]:
    return [run_step(engine, *step) for step in steps]


def assert_same(found: list[StepOutput], wanted: list[StepOutput]) -> None:
    for (result, arrays), (other, others) in zip(found, wanted, strict=True):
        assert result.rows == other.rows
        for name in ("ids", "top_ids", "ranks"):
            np.testing.assert_array_equal(getattr(arrays, name), getattr(others, name))
        np.testing.assert_allclose(arrays.values, others.values, atol=TOLERANCE)


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01},
        {"max_tokens": 2},
        {"logprobs": 3},
        {"logprobs": 25},
        {"logprobs": ALL_TOKENS},
        {"logprobs": 40, "temperature": 0.9, "seed": 3},
        {"prompt_logprobs": 2},
        {"prompt_logprobs": ALL_TOKENS},
        {"presence_penalty": 2.0, "frequency_penalty": 0.7, "logprobs": 3},
        {"repetition_penalty": 1.6, "temperature": 0.9},
        {"logit_bias": [(9, 4.0), (20, -100.0)], "bad_words": [[11], [30]], "logprobs": 40},
        {"allowed_token_ids": [*range(8, 40)], "min_tokens": 3, "ignore_eos": False},
    ],
    ids=str,
)
def test_steps_launched_ahead_match_the_host_engine(
    checkpoint: Path, engine: DeviceEngine, rules: dict[str, Any]
) -> None:
    wanted = one_by_one(make_engine(checkpoint), steps_of(**rules))
    assert_same(launched_ahead(engine, steps_of(**rules)), wanted)


def test_prompt_logprobs_are_computed_before_later_steps(
    engine: DeviceEngine,
) -> None:
    first, second, *_ = steps_of(prompt_logprobs=2)
    with held_results(engine):
        outputs = [submitted(engine, first)]
        calls = count_calls(engine)
        outputs.append(submitted(engine, second))
        num_launched = len(calls)
        assert num_launched > 0
    wait(outputs)
    assert len(calls) == num_launched, "the model is not asked again when results are collected"


def count_calls(engine: DeviceEngine) -> list[str]:
    """Counts calls of the head from now on."""
    model: Any = engine._segments.model
    calls: list[str] = []
    logits = model.logits

    def counted(*arguments: Any) -> Any:
        calls.append("logits")
        return logits(*arguments)

    model.logits = counted
    return calls


def test_a_step_under_way_holds_no_logits(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory on a GPU is measured for one step at a time."""
    engine = make_engine(checkpoint, "device", enforce_eager=True)
    model: Any = engine._segments.model
    made: list[ReferenceType[Any]] = []
    logits = model.logits

    def noted(*arguments: Any) -> Any:
        found = logits(*arguments)
        made.append(ref(found))
        return found

    monkeypatch.setattr(model, "logits", noted)
    with held_results(engine):
        outputs = [submitted(engine, step) for step in steps_of(logprobs=40)]
        assert len(made) == len(outputs)
        assert all(each() is None for each in made)
    wait(outputs)


def test_a_text_that_ends_emits_nothing_in_steps_that_were_launched_already(
    engine: DeviceEngine,
) -> None:
    """Slot 0 ends with its second token, unknown when two further plans included it."""
    texts = launched_ahead(engine, steps_of())
    second = int(texts[2][1].ids[0])
    engine.reset()
    found = launched_ahead(engine, steps_of(stop_token_ids=[second]))
    assert [[row.slot for row in result.rows] for result, _ in found[1:4]] == [
        [0, 1],
        [0, 1],
        [1, 2],
    ]
    assert found[2][0].rows[0].finish == "stop"
    for (_, arrays), (_, others) in zip(found[3:], texts[3:], strict=True):
        assert set(arrays.ids.tolist()) <= set(others.ids.tolist())
    assert engine.num_running == 2


def test_a_row_with_bad_words_of_several_ids_waits_for_earlier_tokens(
    checkpoint: Path, engine: DeviceEngine
) -> None:
    """Penalties then run on the host, too."""
    rules = {"presence_penalty": 2.0, "repetition_penalty": 1.6, "bad_words": [[9], [11, 12]]}
    first, *others = steps_of(**rules)
    with ThreadPoolExecutor(1) as thread, held_results(engine) as is_released:
        outputs = [submitted(engine, first)]
        submitting = [thread.submit(submitted, engine, step) for step in others]
        assert wait(submitting[:1], timeout=0.1).not_done
        is_released.set()
        outputs += [each.result() for each in submitting]
    found = [output.result() for output in outputs]
    assert_same(found, one_by_one(make_engine(checkpoint), steps_of(**rules)))


@cache
def drafting(kernels: str, method: str) -> AnyEngine:
    speculation = {"method": method, "num_speculative_tokens": 2, "adaptive": False}
    settings = {"speculative_config": speculation, "max_model_len": 96, "max_num_seqs": 4}
    return make_engine(EMBEDDED_MODEL, kernels, **settings)


@pytest.mark.parametrize("method", ["mtp", "ngram"])
@pytest.mark.parametrize("pipeline_depth", [1, 3])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"presence_penalty": 0.4, "repetition_penalty": 1.2},
        {"logit_bias": [(14, 3.0)], "frequency_penalty": 0.6, "logprobs": 2},
    ],
    ids=str,
)
def test_drafts_match_the_host_engine(
    method: str, pipeline_depth: int, rules: dict[str, Any]
) -> None:
    """The verified drafts, and the number of accepted ones."""
    prompts = [[300 + num, 301, 302, 14, 300 + num, 301] for num in range(4)]
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=24, ignore_eos=True, **rules)
    found, wanted = (
        scheduled.run(drafting(kernels, method), prompts, params, pipeline_depth=pipeline_depth)
        for kernels in ("device", "torch")
    )
    assert found.texts == wanted.texts
    assert found.verified == wanted.verified
    assert found.num_accepted > 0


@pytest.mark.parametrize("num_logprobs", [3, 30, ALL_TOKENS])
def test_logprobs_of_tokens_that_were_drafts_match_runs_without_drafts(
    tmp_path: Path, num_logprobs: int
) -> None:
    """At a high temperature drafts of a random head are often accepted: they are sampled with the
    random bits of their target tokens."""
    save_mimo(tmp_path)
    params = SamplingParams(seed=1, temperature=6.0, max_tokens=12, logprobs=num_logprobs)
    speculation = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    engine = make_engine(tmp_path, "device", speculative_config=speculation)
    found = scheduled.run(engine, random_prompts(6), params, pipeline_depth=3)
    wanted = scheduled.run(make_engine(tmp_path), random_prompts(6), params)
    assert found.texts == wanted.texts
    assert found.num_accepted > 0
    for logprobs, others in zip(found.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, others, atol=TOLERANCE)


def test_a_reset_waits_for_results_and_forgets_all_sequences(engine: DeviceEngine) -> None:
    wanted = launched_ahead(engine, steps_of())
    engine.reset()
    with ThreadPoolExecutor(1) as thread, held_results(engine) as is_released:
        output = submitted(engine, steps_of(max_tokens=30)[0])
        resetting = thread.submit(engine.reset)
        assert wait([resetting], timeout=0.1).not_done
        is_released.set()
        assert output.result()[0].rows
        resetting.result()
    assert engine.num_running == 0
    result, arrays = run_step(engine, plan(prefill=[Prefill(0, 5)], decode=[1]), NO_IDS)
    assert (result.rows, len(arrays.ids)) == ([], 0)
    engine.reset()
    found = launched_ahead(engine, steps_of())
    assert_same(found, wanted)
    assert found[0][0].idle_s == 0.0


def test_steps_after_a_broken_one_have_its_error(
    engine: DeviceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(result: PendingResult) -> StepRows:
        raise RuntimeError("the card fell off the bus")

    first, second, third, *_ = steps_of()
    with held_results(engine):
        outputs = [submitted(engine, first), submitted(engine, second)]
        monkeypatch.setattr(engine._runner, "finish", broken)
    for output in outputs:
        with pytest.raises(RuntimeError, match="fell off"):
            output.result()
    for call in (lambda: submitted(engine, third), engine.reset):
        with pytest.raises(RuntimeError, match="fell off"):
            call()


def test_recorded_steps_match_eager_ones(checkpoint: Path, engine: DeviceEngine) -> None:
    """With graphs of four rows, some of them padding, and of the exact number."""
    eager = make_engine(checkpoint, "device", enforce_eager=True)
    rules = {"logprobs": 2, "temperature": 0.9}
    found = launched_ahead(engine, steps_of(**rules))
    assert_same(found, launched_ahead(eager, steps_of(**rules)))


def test_declared_acceptance_wants_drafts_and_the_engine_of_gpus() -> None:
    for kernels in ("torch", "device"):
        with pytest.raises(ConfigError, match="draft-acceptance"):
            make_engine(
                EMBEDDED_MODEL,
                kernels,
                draft_acceptance=0.5,
                max_model_len=64,
                speculative_config={"method": "none"},
            )
