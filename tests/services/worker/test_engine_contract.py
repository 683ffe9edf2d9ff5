"""The scheduler's guarantees: emitted rows, ends of sequences, ignored rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.engines import ENGINES, KERNELS, AnyEngine, make_engine
from benchmarks.harness.step_engine import run_step
from services.worker.backends.native import NativeLM
from services.worker.models.registry import read_model_config
from shared.model_folder import read_eos_ids
from shared.wire.messages import (
    Admit,
    Decode,
    Extend,
    Prefill,
    ResultRow,
    SamplingParams,
    StepPlan,
    StepResult,
)
from tests.services.worker.checkpoints import (
    EOS_ID,
    MAX_POSITIONS,
    VOCAB_SIZE,
    change_config,
    random_prompts,
    save_qwen2,
)
from tests.services.worker.driver import Driver, Job, model_of

NO_IDS = np.zeros(0, np.int32)
not_on_the_device = pytest.mark.parametrize(
    "shared_engine", [*KERNELS, pytest.param("device", marks=pytest.mark.slow)], indirect=True
)
FOREVER = SamplingParams(seed=0, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=ENGINES)
def shared_engine(request: pytest.FixtureRequest, checkpoint: Path) -> AnyEngine:
    return make_engine(checkpoint, request.param)


@pytest.fixture
def engine(shared_engine: AnyEngine) -> AnyEngine:
    shared_engine.reset()
    return shared_engine


def admit(slot: int, num_ids: int, params: SamplingParams = FOREVER, route: int = 0) -> Admit:
    blocks = list(range(slot * 8, slot * 8 + 8))
    return Admit(slot, f"r{slot}", 2, route, 0, num_ids, num_ids, 0, params, blocks)


def plan(
    release: list[int] | None = None,
    admit: list[Admit] | None = None,
    prefill: list[Prefill] | None = None,
    decode: list[int] | None = None,
    extend: list[Extend] | None = None,
) -> StepPlan:
    rows = [Decode(slot) for slot in decode or []]
    return StepPlan(1, release or [], admit or [], extend or [], prefill or [], rows)


def step(engine: AnyEngine, plan: StepPlan, ids: np.ndarray) -> tuple[StepResult, np.ndarray]:
    """The result and the emitted ids."""
    result, arrays = run_step(engine, plan, ids)
    return result, arrays.ids


def ids(*lengths: int) -> np.ndarray:
    return np.arange(10, 10 + sum(lengths), dtype=np.int32)


@contextmanager
def poisoned(engine: AnyEngine, token: int) -> Iterator[None]:
    """Gives NaN to every sequence that uses the token."""
    model = model_of(engine)
    if isinstance(model, NativeLM):
        (weight,) = (each.rows for each in model.trunk.operators if each.rows is not None)
    else:
        weight = model.get_parameter("model.model.embed_tokens.weight.values")
    saved = weight[token].clone()
    weight[token] = float("nan")
    yield
    weight[token] = saved


def decode_until_end(engine: AnyEngine, slot: int) -> tuple[list[int], ResultRow]:
    emitted: list[int] = []
    for _ in range(2 * MAX_POSITIONS):
        result, tokens = step(engine, plan(decode=[slot]), NO_IDS)
        emitted += tokens.tolist()
        if result.rows[0].finish:
            return emitted, result.rows[0]
    raise AssertionError("the sequence does not end")


def test_a_row_samples_when_it_has_computed_all_it_knows(engine: AnyEngine) -> None:
    admits = [admit(0, 5), admit(1, 3)]
    result, tokens = step(
        engine, plan(admit=admits, prefill=[Prefill(0, 4), Prefill(1, 3)]), ids(5, 3)
    )
    assert [row.slot for row in result.rows] == [1]
    assert tokens.dtype == np.int32
    assert len(tokens) == 1
    result, tokens = step(engine, plan(prefill=[Prefill(0, 1)], decode=[1]), NO_IDS)
    assert [(row.slot, row.run.num_tokens) for row in result.rows] == [(0, 1), (1, 1)]
    assert len(tokens) == 2


def test_rows_come_by_route_then_slot_with_their_own_ids(engine: AnyEngine) -> None:
    routes = {5: 1, 1: 2, 3: 1, 4: 0, 2: 2}
    admits = [admit(slot, 4, route=route) for slot, route in routes.items()]
    rows = plan(admit=admits, prefill=[Prefill(slot, 4) for slot in routes])
    prompts = ids(4, 4, 4, 4, 4)
    result, tokens = step(engine, rows, prompts)
    assert [row.slot for row in result.rows] == [4, 3, 5, 1, 2]
    assert {(row.request, row.attempt) for row in result.rows} == {
        (f"r{slot}", 2) for slot in routes
    }
    for index, slot in enumerate(routes):
        engine.reset()
        own = prompts[4 * index : 4 * index + 4]
        _, alone = step(engine, plan(admit=[admit(slot, 4)], prefill=[Prefill(slot, 4)]), own)
        assert alone[0] == tokens[[row.slot for row in result.rows].index(slot)]


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_max_tokens_ends_with_length(engine: AnyEngine, max_tokens: int) -> None:
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    job = Job([20, 21, 22], params)
    (text,) = Driver(engine).run([job])
    assert len(text) == max_tokens
    assert job.end is not None
    assert job.end.finish == "length"


@not_on_the_device
def test_without_max_tokens_the_context_is_filled(engine: AnyEngine) -> None:
    job = Job([20, 21, 22], FOREVER)
    (text,) = Driver(engine).run([job])
    assert len(text) == MAX_POSITIONS - 3
    assert job.end is not None
    assert job.end.finish == "length"


def test_max_model_len_wins_over_max_tokens(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, max_model_len=16)
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=100, ignore_eos=True)
    (text,) = Driver(engine).run([Job([20, 21, 22], params)])
    assert len(text) == 13


@not_on_the_device
def test_an_end_token_is_emitted_and_ends_with_stop(engine: AnyEngine) -> None:
    """At a high temperature the end comes by chance; then it is the last token and the only end."""
    params = SamplingParams(seed=11, temperature=50.0)
    jobs = [Job(prompt, params, choice) for choice, prompt in enumerate(random_prompts(6))]
    texts = Driver(engine).run(jobs)
    stopped = [
        text for job, text in zip(jobs, texts, strict=True) if job.end and job.end.finish == "stop"
    ]
    assert stopped
    for text in stopped:
        assert text.index(EOS_ID) == len(text) - 1


@not_on_the_device
def test_ignore_eos_goes_on(engine: AnyEngine) -> None:
    params = SamplingParams(seed=11, temperature=50.0, ignore_eos=True)
    texts = Driver(engine).run([Job(prompt, params) for prompt in random_prompts(3)])
    assert any(EOS_ID in text[:-1] for text in texts)


def test_end_tokens_of_both_configuration_files_count(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    engine = make_engine(tmp_path)
    params = SamplingParams(seed=1, temperature=50.0)
    texts = Driver(engine).run([Job(prompt, params) for prompt in random_prompts(20)])
    assert {text[-1] for text in texts if len(text) < MAX_POSITIONS // 2} <= {3, 4, EOS_ID}
    assert {3, 4, EOS_ID} & {text[-1] for text in texts}


def test_end_ids_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    save_qwen2(tmp_path)
    change_config(tmp_path, eos_token_id=[-1, EOS_ID, 9, VOCAB_SIZE])
    assert read_eos_ids(tmp_path, read_model_config(tmp_path).vocab_size) == [EOS_ID, 9]


def test_a_finished_slot_ignores_later_plans(engine: AnyEngine) -> None:
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=1)
    result, _ = step(engine, plan(admit=[admit(0, 3, params)], prefill=[Prefill(0, 3)]), ids(3))
    assert result.rows[0].finish == "length"
    assert engine.num_running == 0
    for _ in range(2):
        result, tokens = step(engine, plan(decode=[0]), NO_IDS)
        assert result.rows == []
        assert len(tokens) == 0
    result, tokens = step(
        engine, plan(release=[0], admit=[admit(0, 3)], prefill=[Prefill(0, 3)]), ids(3)
    )
    assert result.rows[0].finish is None
    assert len(tokens) == 1


def test_a_released_slot_is_not_computed_any_more(engine: AnyEngine) -> None:
    step(engine, plan(admit=[admit(0, 3), admit(1, 3)], prefill=[Prefill(0, 3)]), ids(3, 3))
    result, _ = step(engine, plan(release=[0], prefill=[Prefill(1, 3)]), NO_IDS)
    assert [row.slot for row in result.rows] == [1]
    assert engine.num_running == 1


def test_an_empty_plan_is_a_step(engine: AnyEngine) -> None:
    result, tokens = step(engine, plan(), NO_IDS)
    assert isinstance(result, StepResult)
    assert result.rows == []
    assert tokens.dtype == np.int32
    assert result.step_s > 0


def test_blocks_that_come_later_are_used(engine: AnyEngine) -> None:
    prompt = ids(30)
    whole = admit(0, 30)
    _, expected = step(engine, plan(admit=[whole], prefill=[Prefill(0, 30)]), prompt)
    engine.reset()
    short = Admit(0, "r0", 2, 0, 0, 30, 30, 0, FOREVER, [9, 1])
    step(engine, plan(admit=[short], prefill=[Prefill(0, 8)]), prompt)
    later = [Extend(0, [7]), Extend(0, [30, 2, 4, 3, 5])]
    _, tokens = step(engine, plan(extend=later, prefill=[Prefill(0, 22)]), NO_IDS)
    assert tokens.tolist() == expected.tolist()


def test_cached_tokens_are_not_computed_again(engine: AnyEngine) -> None:
    prompt = ids(10)
    _, expected = step(engine, plan(admit=[admit(0, 10)], prefill=[Prefill(0, 10)]), prompt)
    sharing = Admit(1, "r1", 0, 0, 0, 10, 10, 8, FOREVER, [0, 1, 40, 41])
    _, tokens = step(engine, plan(admit=[sharing], prefill=[Prefill(1, 2)]), prompt)
    assert tokens.tolist() == expected.tolist()


def test_a_slot_forgets_the_blocks_it_had(engine: AnyEngine) -> None:
    """Slot 0's writes beyond its reservation must not reach its former blocks, now slot 1's."""
    prompt = ids(20)
    step(engine, plan(admit=[admit(0, 20)], prefill=[Prefill(0, 20)]), prompt)
    _, expected = step(engine, plan(decode=[0]), NO_IDS)
    heir = Admit(1, "r1", 0, 0, 0, 20, 20, 0, FOREVER, list(range(8)))
    step(engine, plan(release=[0], admit=[heir], prefill=[Prefill(1, 20)]), prompt)
    bare = Admit(0, "r0", 0, 0, 0, 20, 20, 0, FOREVER, [])
    step(engine, plan(admit=[bare], prefill=[Prefill(0, 20)]), prompt[::-1])
    _, tokens = step(engine, plan(decode=[1]), NO_IDS)
    assert tokens.tolist() == expected.tolist()


def test_a_row_with_bad_logits_fails_alone(engine: AnyEngine) -> None:
    rows = plan(admit=[admit(0, 2), admit(1, 2)], prefill=[Prefill(0, 2), Prefill(1, 2)])
    with poisoned(engine, 12):
        result, tokens = step(engine, rows, ids(2, 2))
    good, bad = result.rows
    assert (good.slot, good.run.num_tokens, good.error) == (0, 1, None)
    assert (bad.slot, bad.run.num_tokens, bad.finish) == (1, 0, None)
    assert "not finite" in str(bad.error)
    assert len(tokens) == 1
    assert engine.num_running == 1


def test_a_sequence_fails_once_whatever_logprobs_it_asked_for(engine: AnyEngine) -> None:
    params = SamplingParams(seed=0, temperature=0.0, logprobs=1, prompt_logprobs=1)
    with poisoned(engine, 12):
        result, _ = step(engine, plan(admit=[admit(0, 5, params)], prefill=[Prefill(0, 5)]), ids(5))
    assert [(row.slot, "not finite" in str(row.error)) for row in result.rows] == [(0, True)]


def test_drafts_that_were_not_made_are_not_verified(engine: AnyEngine) -> None:
    step(engine, plan(admit=[admit(0, 5)], prefill=[Prefill(0, 5)]), ids(5))
    result, tokens = step(engine, StepPlan(2, [], [], [], [], [Decode(0, 5)]), NO_IDS)
    assert [(row.run.num_tokens, row.run.num_drafts) for row in result.rows] == [(1, 0)]
    assert len(tokens) == 1


def test_kv_that_a_failed_sequence_left_in_its_blocks_harms_no_other_sequence(
    engine: AnyEngine,
) -> None:
    """Ragged rows share an attention call, so the shorter one's last block is read to its end."""
    rows = plan(admit=[admit(0, 9), admit(1, 13)], prefill=[Prefill(0, 9), Prefill(1, 13)])
    prompts = ids(9, 13)
    step(engine, rows, prompts)
    _, expected = step(engine, plan(decode=[0, 1]), NO_IDS)
    with poisoned(engine, 12):
        step(
            engine, plan(admit=[admit(0, 30)], prefill=[Prefill(0, 30)]), np.full(30, 12, np.int32)
        )
    step(engine, rows, prompts)
    _, again = step(engine, plan(decode=[0, 1]), NO_IDS)
    assert again.tolist() == expected.tolist()


def test_a_plan_that_gives_more_than_a_row_lacks_is_an_error(engine: AnyEngine) -> None:
    with pytest.raises(ValueError, match="more tokens for a slot than are left"):
        step(engine, plan(admit=[admit(0, 3)], prefill=[Prefill(0, 4)]), ids(3))


def test_prefill_then_decode_to_the_end_counts_every_token(engine: AnyEngine) -> None:
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=6, ignore_eos=True)
    _, first = step(engine, plan(admit=[admit(2, 3, params)], prefill=[Prefill(2, 3)]), ids(3))
    rest, row = decode_until_end(engine, 2)
    assert len(first) + len(rest) == 6
    assert row.finish == "length"
