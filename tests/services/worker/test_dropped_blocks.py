"""Sequences whose blocks are given back behind windows, to others that leave NaN there, have the
bits of those that keep all of their blocks."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.harness.engines import make_engine
from services.worker.foreign import backend
from services.worker.machine.kv_groups import LayerGroups
from services.worker.startup import model_shape
from shared.wire.messages import EVERY_LAYER, SamplingParams
from tests.services.worker.driver import Job
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.tight_driver import TightDriver

FAMILIES = ("GptOssForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "MistralForCausalLM")
MAX_LEN = 320
CHUNKS = [1, 7, 30, 13]
slow = pytest.mark.slow


class Case(NamedTuple):
    kernels: str
    dtype: str = "float32"
    cache: str = "auto"
    method: str = "none"


CASES = [
    Case("native", "bfloat16"),
    Case("native", "bfloat16", "int8"),
    Case("native", "float32", "fp8", "ngram"),
    Case("torch"),
    Case("torch", "float32", "int8", "ngram"),
]
MORE_CASES = [
    Case("native"),
    Case("native", "bfloat16", "fp8", "ngram"),
    Case("torch", "bfloat16", "fp8"),
    Case("torch", "bfloat16", "auto", "ngram"),
]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_family(path, request.param, max_position_embeddings=MAX_LEN)
    return path


def engine_of(folder: Path, case: Case, **settings: Any) -> Any:
    drafts = {"method": case.method, "num_speculative_tokens": 3}
    own = {
        "dtype": case.dtype,
        "kv_cache_dtype": case.cache,
        "max_num_batched_tokens": 60,
        "speculative_config": drafts if case.method != "none" else {"method": "none"},
    }
    return make_engine(folder, case.kernels, **(own | settings))


def jobs() -> list[Job]:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(8, 160, length).tolist() for length in (150, 9, 201, 130)]
    prompts[2] = prompts[2][:40] * 5  # for prompt lookup
    return [
        Job(prompt, SamplingParams(seed, 0.5, max_tokens=110, ignore_eos=True, logprobs=3))
        for seed, prompt in enumerate(prompts)
    ]


def with_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_group(layers: list[Any], _: Any) -> LayerGroups:
        return LayerGroups(EVERY_LAYER, (0,) * len(layers))

    for module in (model_shape, backend):
        monkeypatch.setattr(module, "group_layers", one_group)


def bits(done: list[Job]) -> list[tuple[list[int], bytes]]:
    return [(job.emitted, np.stack(job.logprobs).tobytes()) for job in done]


def assert_same_bits(
    folder: Path,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> TightDriver:
    """Returns the driver with few blocks."""
    engine = engine_of(folder, case, **(settings or {}))
    depth = 0 if case.method == "none" else 3
    tight, found, expected = TightDriver(engine, CHUNKS, depth=depth, **options), jobs(), jobs()
    tight.run(found)
    assert tight.num_dropped > 100 // engine.capacity.block_size
    with_one_group(monkeypatch)
    plain = engine_of(folder, case, **(settings or {}))
    assert plain.capacity.groups == EVERY_LAYER
    TightDriver(plain, CHUNKS, depth=depth, **options).run(expected)
    assert bits(found) == bits(expected)
    return tight


@pytest.mark.parametrize("num_at_once", [1, 3])
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=slow) for case in MORE_CASES)], ids=", ".join
)
def test_what_was_dropped_is_not_missed(
    folder: Path, case: Case, num_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_bits(folder, case, monkeypatch, num_at_once=num_at_once)
