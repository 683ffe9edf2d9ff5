"""Consecutive steps in native code give the same results as the engine's other steps."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from benchmarks.harness.scheduled import Run
from services.worker.engine.host import HostEngine
from services.worker.engine.plain_steps import PlainSteps
from services.worker.startup.implementations import PARTS
from services.worker.step.results import StepRows
from shared.wire.messages import Guide, Repetition, SamplingParams
from tests.services.worker.checkpoints import EOS_ID, random_prompts, save_model, save_qwen2
from tests.services.worker.test_engine_contract import poisoned
from tests.services.worker.test_families import CASES

Counted = Callable[[], tuple[int, int]]
# A case of ``CASES``, and the settings of its engine.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("llama", {}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
    "codes": ("llama", {"quantization": "wint4", "kv_cache_dtype": "int8", "num_threads": 2}),
    "experts": ("qwen3 moe", {}),
    "windows": ("gemma 2", {}),
    "latents": ("deepseek v3, yarn", {}),
}
# Greedy and sampled, some with filters; ends by eos, by length, and late.
PLAIN: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 30},
    {"temperature": 1.0, "max_tokens": 1},
    {"temperature": 1.0, "max_tokens": 50},
    {"temperature": 3.0, "top_k": 40, "max_tokens": 70},
    {"temperature": 2.0, "top_p": 0.9, "min_p": 0.01, "max_tokens": None},
    {"temperature": 3.0, "ignore_eos": True, "max_tokens": 60},
    {"temperature": 0.0, "ignore_eos": True, "max_tokens": None},
)
MORE: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 0.5},
    {"logprobs": 0},
    {"prompt_logprobs": 0},
    {"stop_token_ids": [9]},
    {"repetition": Repetition(8, 1, 9)},
    *([{"guide": Guide("start: /[^]*/")}] if "guides" in PARTS else []),
)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Returns the calls of native code for several steps, and the steps computed."""
    calls: list[int] = []
    run = PlainSteps.run

    def noting(self: PlainSteps, batch: Any, num_steps: int) -> tuple[StepRows, int]:
        rows, num = run(self, batch, num_steps)
        calls.append(num)
        return rows, num

    monkeypatch.setattr(PlainSteps, "run", noting)
    return lambda: (len(calls), sum(calls))


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostEngine:
    case, settings = ENGINES[request.param]
    family, changes = CASES[case]
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, family, **changes, eos_token_id=[EOS_ID, 30, 60, 90])
    own: HostEngine = make_engine(folder, "native", **settings)
    return own


def run(own: HostEngine, **options: Any) -> Run:
    params = [SamplingParams(seed=5 * i - 2, **PLAIN[i % len(PLAIN)]) for i in range(14)]
    return scheduled.run(own, random_prompts(14), params, num_steps=5, **options)


def without(own: HostEngine, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Run:
    with monkeypatch.context() as patch:
        patch.setattr(own, "_plain_steps", None)
        return run(own, **options)


@pytest.mark.parametrize(
    "max_open",
    [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(1000, marks=pytest.mark.slow)],
)
def test_texts_and_ends_are_the_same(
    engine: HostEngine, max_open: int, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = without(engine, monkeypatch, max_open=max_open)
    assert counted() == (0, 0)
    found = run(engine, max_open=max_open)
    num_calls, num_steps = counted()
    assert num_steps > num_calls > 0
    assert found.texts == wanted.texts
    assert found.ends == wanted.ends
    assert found.verified == wanted.verified
    assert {"stop", "length"} == set(found.ends)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> HostEngine:
    folder = tmp_path_factory.mktemp("small")
    save_qwen2(folder)
    own: HostEngine = make_engine(folder, "native")
    return own


@pytest.mark.parametrize("max_open", [pytest.param(1, marks=pytest.mark.slow), 14])
def test_a_row_that_is_not_finite_fails_alone(
    small: HostEngine, max_open: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its output reaches a token with a NaN embedding."""
    token = run(small).texts[6][20]
    with poisoned(small, token):
        wanted = without(small, monkeypatch, max_open=max_open)
        found = run(small, max_open=max_open)
    assert found.texts == wanted.texts
    assert found.ends == wanted.ends
    assert found.ends[6] == "error"
    assert set(found.ends) >= {"error", "length"}


@pytest.mark.parametrize("more", MORE, ids=[next(iter(each)) for each in MORE])
def test_rows_with_logprobs_get_them_and_others_are_unchanged(
    small: HostEngine, more: dict[str, Any], counted: Counted
) -> None:
    """While it runs, no sequence's steps are plain."""
    params = [SamplingParams(seed=i, temperature=2.0, max_tokens=40) for i in range(3)]
    wanting = SamplingParams(seed=3, temperature=2.0, max_tokens=40, ignore_eos=True, **more)
    prompts = random_prompts(4)
    alone = scheduled.run(small, prompts[:3], params)
    before = counted()
    assert before[0] > 0
    scheduled.run(small, prompts[3:], [wanting])
    assert counted() == before
    beside = scheduled.run(small, prompts, [*params, wanting])
    assert beside.texts[:3] == alone.texts
