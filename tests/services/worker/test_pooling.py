"""Pooled prompts equal transformers', for any division into steps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, KERNELS, make_engine
from benchmarks.harness.scheduled import Run
from services.worker.plan_check import PlanCheck
from services.worker.service import WorkerService
from shared.errors import CodecError, ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import (
    POOLING_MINOR,
    PROTOCOL_MAJOR,
    Admit,
    Capacity,
    Hello,
    Pooling,
    Prefill,
    SamplingParams,
    StepPlan,
)
from tests.pooling_models import (
    NO,
    YES,
    class_logits,
    normalized,
    pooled,
    save_classifier,
    save_embedder,
    save_reranker,
    states_of,
    yes_probabilities,
)
from tests.services.worker.checkpoints import random_prompts

TOLERANCE = 1e-5
PROMPTS = [*random_prompts(8), [5]]


def params(**wanted: Any) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=0, pooling=Pooling(**wanted))


def run(engine: Any, prompts: list[list[int]], wanted: Any, **options: Any) -> Run:
    done = scheduled.run(engine, prompts, wanted, **options)
    assert done.ends == ["length"] * len(prompts)
    assert not any(done.texts)
    return done


def vectors(done: Run) -> list[np.ndarray]:
    return [done.pooled[index] for index in range(len(done.ends))]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder")
    save_embedder(folder)
    return folder


@pytest.mark.parametrize(
    "kernels", ["native", "torch", pytest.param("device", marks=pytest.mark.slow)]
)
def test_embeddings_match_transformers_however_prompts_are_cut(
    kernels: str, embedder: Path
) -> None:
    blocks = 64 // ENGINES[kernels]["block_size"]  # for one prompt of 40 tokens and some others
    engine = make_engine(
        embedder, kernels, max_num_batched_tokens=9, max_model_len=48,
        num_gpu_blocks_override=blocks,
    )  # fmt: skip
    assert engine.capacity.pooled_size == 64
    states = states_of(embedder, PROMPTS)
    modes = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}
    for kind, mode in modes.items():
        expected = [pooled(state, mode) for state in states]
        found = vectors(run(engine, PROMPTS, params(pooling_type=kind)))
        assert np.abs(np.stack(found) - np.stack(expected)).max() < 10 * TOLERANCE
        found = vectors(run(engine, PROMPTS, params(pooling_type=kind, activation="normalize")))
        unit = np.stack([normalized(each) for each in expected])
        assert np.abs(np.stack(found) - unit).max() < TOLERANCE
        short = params(pooling_type=kind, activation="normalize", num_dims=24)
        found = vectors(run(engine, PROMPTS, short))
        unit = np.stack([normalized(each[:24]) for each in expected])
        assert np.abs(np.stack(found) - unit).max() < TOLERANCE


def test_a_batch_gives_the_bits_of_single_prompts(embedder: Path) -> None:
    """Alone a prompt is one chunk; in the batch they are cut and share steps."""
    wide = make_engine(embedder, "native", max_num_batched_tokens=64, max_model_len=64)
    narrow = make_engine(embedder, "native", max_num_batched_tokens=13, max_model_len=64)
    for kind in ("last", "mean", "cls"):
        wanted = params(pooling_type=kind, activation="normalize")
        together = vectors(run(narrow, PROMPTS, wanted))
        for prompt, vector in zip(PROMPTS, together, strict=True):
            (alone,) = vectors(run(wide, [prompt], wanted))
            assert alone.tobytes() == vector.tobytes()


def test_last_states_begin_in_the_cache_and_means_do_not(embedder: Path) -> None:
    prompt = np.random.default_rng(3).integers(0, 8000, 60).tolist()
    prompts = [prompt, [*prompt[:48], 7, 8], prompt]
    engine = make_engine(embedder, "native", max_model_len=64)
    for kind, num_hits in (("last", 2), ("mean", 0), ("cls", 0)):
        wanted = params(pooling_type=kind)
        plain = run(engine, prompts, wanted, caches_prefixes=False)
        cached = run(engine, prompts, wanted, caches_prefixes=True, max_open=1)
        assert cached.num_hits == num_hits
        for first, second in zip(vectors(plain), vectors(cached), strict=True):
            assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize(
    "kernels", ["device", *(pytest.param(each, marks=pytest.mark.slow) for each in KERNELS)]
)
def test_classes_match_transformers(kernels: str, tmp_path: Path) -> None:
    save_classifier(tmp_path, 3)
    engine = make_engine(tmp_path, kernels, max_num_batched_tokens=16, max_model_len=48)
    assert engine.capacity.pooled_size == 3
    expected = class_logits(tmp_path, PROMPTS)
    found = np.stack(vectors(run(engine, PROMPTS, params())))
    assert np.abs(found - expected).max() < 10 * TOLERANCE
    found = np.stack(vectors(run(engine, PROMPTS, params(activation="softmax"))))
    exps = np.exp(expected - expected.max(1, keepdims=True))
    assert np.abs(found - exps / exps.sum(1, keepdims=True)).max() < TOLERANCE


@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_score_of_two_tokens_is_the_second_ones_probability(
    is_tied: bool, tmp_path: Path
) -> None:
    save_reranker(tmp_path, tie_word_embeddings=is_tied)
    tokens = {"classifier_from_token": [NO, YES]}
    engine = make_engine(tmp_path, "native", max_model_len=48, pooler_config=tokens)
    found = np.concatenate(vectors(run(engine, PROMPTS, params(activation="sigmoid"))))
    assert np.abs(found - yes_probabilities(tmp_path, PROMPTS)).max() < TOLERANCE
    with pytest.raises(ConfigError, match="no token 'perhaps'"):
        make_engine(tmp_path, pooler_config={"classifier_from_token": [NO, "perhaps"]})


def test_weights_in_codes_and_dummy_weights_pool_too(embedder: Path, tmp_path: Path) -> None:
    exact = vectors(run(make_engine(embedder, "native"), PROMPTS, params(activation="normalize")))
    forms = {"quantization": "wint8", "embedding_quantization": "wint8"}
    engine = make_engine(embedder, "native", **forms)
    close = vectors(run(engine, PROMPTS, params(activation="normalize")))
    cosines = [np.dot(*pair) for pair in zip(exact, close, strict=True)]
    assert 0.99 < min(cosines) < 1 - 1e-6
    save_classifier(tmp_path, 2)
    dummy = make_engine(tmp_path, load_format="dummy")
    assert len(vectors(run(dummy, PROMPTS, params()))[0]) == 2


def test_plans_of_texts_and_of_pooling_do_not_go_together(embedder: Path) -> None:
    capacity = make_engine(embedder, max_model_len=64).capacity
    ids = np.arange(8, dtype=np.int32)

    def check(wanted: SamplingParams, num_cached: int = 0) -> None:
        blocks = [0, 1]
        admit = Admit(0, "r", 1, 0, 0, 8, 8, num_cached, wanted, blocks)
        plan = StepPlan(1, [], [admit], [], [Prefill(0, 8 - num_cached)], [])
        PlanCheck(capacity, capacity.vocab_size).check(plan, ids)

    check(params(), num_cached=4)
    for wanted, message in (
        (SamplingParams(seed=0), "writes no texts"),
        (params(num_dims=65), "65 numbers of an embedding that has 64"),
        (SamplingParams(seed=0, pooling=Pooling()), "max_tokens is None"),
    ):
        with pytest.raises(CodecError, match=message):
            check(wanted)
    with pytest.raises(CodecError, match="4 cached"):
        check(params(pooling_type="mean"), num_cached=4)


def test_a_scheduler_that_knows_of_no_pooling_is_refused() -> None:
    """It would forward prompts without their pooling parameters."""
    service = WorkerService(WorkerConfig(), lambda config, progress: None)
    capacity = Capacity(8, 16, 1, 8, 64, 100)
    hello = Hello(PROTOCOL_MAJOR, POOLING_MINOR - 1, "scheduler", "s")
    for size, refusal in ((0, None), (64, "protocol minor 0 knows of no pooling, 1 does")):
        with_size = msgspec.structs.replace(capacity, pooled_size=size)
        service._engine = SimpleNamespace(capacity=with_size)
        assert service.refusal(hello) == refusal
        newer = msgspec.structs.replace(hello, minor=POOLING_MINOR)
        assert service.refusal(newer) is None


def test_a_model_that_pools_has_no_head(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    text = "lm-head-quantization: wint8: a model that pools has no output head"
    with pytest.raises(ConfigError, match=text):
        make_engine(tmp_path, runner="pooling", lm_head_quantization="wint8")
