"""Sequences whose blocks are given back behind windows, to others that leave NaN there, have the
bits of those that keep all of their blocks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.harness import scheduled
from benchmarks.harness.engines import KERNELS, make_engine
from benchmarks.harness.scheduled import Run
from services.worker.machine.kv_groups import KVSpec, LayerGroups
from services.worker.startup import model_shape
from shared.errors import ConfigError
from shared.wire.kv_groups import most_blocks
from shared.wire.messages import EVERY_LAYER, Capacity, Group, SamplingParams
from tests.selection import only
from tests.services.worker.checkpoints import save_mimo
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.tight_driver import Poisoned, run_tightly

FAMILIES = ("GptOssForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "MistralForCausalLM")
MAX_LEN = 240
CHUNKS = [40, 1, 7, 30, 13]
LENGTHS = (40, 3, 12)


def params_of(lengths: Sequence[int], **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(seed, 0.5, max_tokens=num, ignore_eos=True, **more)
        for seed, num in enumerate(lengths)
    ]


PARAMS = params_of(LENGTHS, logprobs=3)


class Case(NamedTuple):
    kernels: str
    dtype: str = "float32"
    cache: str = "auto"
    method: str = "none"
    num_at_once: int = 1


CASES = [
    Case("native", "bfloat16"),
    Case("native", "bfloat16", "int8", num_at_once=3),
    Case("native", "float32", "fp8", "ngram"),
    Case("torch", num_at_once=3),
    Case("torch", "float32", "int8", "ngram"),
]
MORE_CASES = [
    Case("native", num_at_once=3),
    Case("native", "bfloat16", "fp8", "ngram", 3),
    Case("torch", "bfloat16", "fp8"),
    Case("torch", "bfloat16", "auto", "ngram", 3),
]
GPT_OSS, GEMMA_2, GEMMA_3, MISTRAL = FAMILIES


def with_each(chosen: list[tuple[str, Any]], others: Iterable[Any], name: str) -> Any:
    """``chosen`` families, each with one of ``others``; the rest is slow."""
    both = only(chosen, FAMILIES, others)
    return pytest.mark.parametrize(("folder", name), both, indirect=["folder"], scope="module")


# Each case, and each family.
each_case = with_each(
    [*zip((GPT_OSS, GEMMA_2, GEMMA_3, MISTRAL, GPT_OSS), CASES, strict=True)],
    [*CASES, *MORE_CASES],
    "case",
)
each_backend = with_each([(GPT_OSS, "native"), (MISTRAL, "torch")], KERNELS, "kernels")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_family(path, request.param, max_position_embeddings=MAX_LEN)
    return path


def prompts() -> list[list[int]]:
    """Of the last one prompt lookup finds much."""
    rng = np.random.default_rng(5)
    first, second, third = (rng.integers(8, 160, length).tolist() for length in (120, 9, 40))
    return [first, second, third * 4]


def engine_of(folder: Path, case: Case, **settings: Any) -> Any:
    own = {
        "dtype": case.dtype,
        "kv_cache_dtype": case.cache,
        "max_num_batched_tokens": 50 * case.num_at_once,
        "speculative_config": {"method": case.method},
    }
    return make_engine(folder, case.kernels, **(own | settings))


def one_group(layers: Sequence[KVSpec], _: Capacity) -> LayerGroups:
    return LayerGroups(EVERY_LAYER, (0,) * len(layers))


def with_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shape, "group_layers", one_group)


def assert_same_bits(found: Run, expected: Run) -> None:
    assert found.num_drops > 3
    assert expected.num_drops == 0
    assert found.texts == expected.texts
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert np.array(ours).tobytes() == np.array(theirs).tobytes()


def check(
    folder: Path,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    params: list[SamplingParams] = PARAMS,
    **options: Any,
) -> Run:
    """Returns the results with few blocks."""
    options |= {"num_at_once": case.num_at_once, "depth": 0 if case.method == "none" else 3}
    asked = prompts(), params, CHUNKS
    engine = Poisoned(engine_of(folder, case))
    options["windows"] = engine.capacity.groups
    found = run_tightly(engine, *asked, **options)
    with_one_group(monkeypatch)
    plain = engine_of(folder, case)
    assert plain.capacity.groups == EVERY_LAYER
    assert_same_bits(found, run_tightly(plain, *asked, **options))
    return found


@each_case
def test_dropped_blocks_are_not_missed(
    folder: Path, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(folder, case, monkeypatch)


@with_each([(GEMMA_3, CASES[1])], [CASES[1], CASES[4]], "case")
def test_sequences_resume_from_the_blocks_of_their_windows(
    folder: Path, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(folder, case, monkeypatch, resume_every=5).num_hits > 5


@each_backend
def test_several_steps_go_on_in_the_tables_of_all_groups(
    folder: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(kernels, num_at_once=3)
    found = check(folder, case, monkeypatch, params_of(LENGTHS), num_steps=8)
    assert found.num_long_plans > 3


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.slow)])
def test_an_mtp_head_drafts_from_the_blocks_of_the_first_group(
    tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    save_mimo(tmp_path, max_position_embeddings=MAX_LEN, **windows)
    long = params_of((90, 3, 20), logprobs=3)
    found = check(tmp_path, Case(kernels, method="mtp"), monkeypatch, long, resume_every=7)
    assert found.num_accepted > 5
    assert found.num_hits > 3


@with_each([(GPT_OSS, "ngram")], ["none", "ngram"], "method")
def test_the_scheduler_squeezes_sequences_into_the_blocks_of_two(folder: Path, method: str) -> None:
    case = Case("native", method=method)
    plenty = engine_of(folder, case)
    starts = [prompts()[0][: 90 + 10 * num] for num in range(6)]
    params = SamplingParams(1, 0.7, max_tokens=90, ignore_eos=True)
    expected = scheduled.run(plenty, starts, params)
    num_blocks = 2 * most_blocks(plenty.capacity, MAX_LEN)
    tight = engine_of(folder, case, num_gpu_blocks_override=num_blocks)
    found = scheduled.run(tight, starts, params, caches_prefixes=True, max_open=5)
    assert found.texts == expected.texts
    assert found.num_hits > 3
    assert found.num_drops > 10


def test_a_cache_of_one_request_has_the_blocks_that_it_needs_at_once(tmp_path: Path) -> None:
    save_family(tmp_path, "MistralForCausalLM", max_position_embeddings=MAX_LEN)
    case = CASES[2]
    capacity = engine_of(tmp_path, case).capacity
    assert capacity.groups == (Group(5),)
    num_blocks = most_blocks(capacity, MAX_LEN)
    assert num_blocks < MAX_LEN // capacity.block_size - 2
    engine = engine_of(tmp_path, case, num_gpu_blocks_override=num_blocks)
    assert engine.capacity.num_blocks == num_blocks
    run = run_tightly(Poisoned(engine), prompts(), PARAMS, CHUNKS, depth=3)
    assert [len(text) for text in run.texts] == [*LENGTHS]
    problem = f"{num_blocks - 1} blocks of 16 tokens; .* takes {num_blocks}: raise the one"
    with pytest.raises(ConfigError, match=problem):
        engine_of(tmp_path, case, num_gpu_blocks_override=num_blocks - 1)
