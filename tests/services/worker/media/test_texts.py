"""Texts about pictures against transformers, token by token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.harness.engines import make_engine
from services.worker.backends.native import NativeLM
from services.worker.media import tower_plan
from shared.wire.messages import ALL_TOKENS
from tests.media.references import Reference
from tests.selection import only
from tests.services.worker.driver import model_of
from tests.services.worker.media.prompts import (
    GREEDY,
    KERNELS,
    Chat,
    MediaDriver,
    MediaJob,
    chat,
    each_family,
    texts_of,
)

pytestmark = each_family

LIMITS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 512}


@pytest.fixture(scope="session")
def chats(oracle: Reference) -> dict[str, Chat]:
    first, second = (oracle.picture(seed, 3, 5) for seed in (1, 2))
    wide = oracle.picture(3, 7, 2)
    return {
        "first": chat(oracle, "Describe it. ", first, "In one word."),
        "second": chat(oracle, "Describe it. ", second, "In one word."),
        "image alone": chat(oracle, wide),
        "two": chat(oracle, first, " and ", wide, ": which is wider?"),
        "one twice": chat(oracle, "Compare ", second, " with ", second, "."),
        "none": chat(oracle, "No picture at all."),
    }


@pytest.fixture(scope="session", params=KERNELS)
def engine(request: pytest.FixtureRequest, folder: Path) -> Any:
    made = make_engine(folder, request.param, **LIMITS)
    assert isinstance(model_of(made), NativeLM) == (request.param == "native")
    return made


@pytest.mark.parametrize(
    ("name", "chunk_size"),
    only(
        [("image alone", 1), ("first", 7), ("two", 1000), ("one twice", 7), ("none", 1000)],
        ["first", "second", "image alone", "two", "one twice", "none"],
        [1, 7, 1000],
    ),
)
def test_a_text_is_that_of_transformers(
    engine: Any, chats: dict[str, Chat], name: str, chunk_size: int
) -> None:
    (text,) = texts_of(engine, [chats[name]], chunk_sizes=[chunk_size])
    assert text == chats[name].expected.ids


def test_texts_differ_by_the_picture_alone(chats: dict[str, Chat]) -> None:
    first, second = chats["first"].expected, chats["second"].expected
    assert first.prompt_ids == second.prompt_ids
    assert first.ids != second.ids


@pytest.mark.parametrize("num_steps", [1, 5])
def test_prompts_side_by_side_and_plans_of_several_steps(
    engine: Any, chats: dict[str, Chat], num_steps: int
) -> None:
    texts = texts_of(engine, [*chats.values()], chunk_sizes=[30, 11, 3], num_steps=num_steps)
    assert texts == [each.expected.ids for each in chats.values()]


def test_a_cache_of_prefixes_may_end_anywhere(engine: Any, chats: dict[str, Chat]) -> None:
    """Within the first item and after it; its positions count after it too."""
    found = chats["two"]
    first, second = found.items
    texts_of(engine, [found])
    for num_cached in (first.start + 4, first.end, second.start, second.start + 9, second.end + 1):
        (text,) = texts_of(engine, [found], num_cached=num_cached, chunk_sizes=[1000, 5])
        assert text == found.expected.ids, num_cached


@pytest.mark.parametrize("kernels", KERNELS)
def test_drafts_change_no_text(folder: Path, chats: dict[str, Chat], kernels: str) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    drafting = make_engine(folder, kernels, speculative_config=config, **LIMITS)
    driver = MediaDriver(drafting, chunk_sizes=[50], depth=3)
    texts = driver.run([each.job() for each in chats.values()])
    assert texts == [each.expected.ids for each in chats.values()]
    assert driver.wrapped.num_accepted


def test_features_that_are_not_kept_are_computed_again(
    folder: Path, chats: dict[str, Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tower_plan, "CACHE_BYTES", 1)
    made = make_engine(folder, **LIMITS)
    texts = texts_of(made, [*chats.values()], chunk_sizes=[5, 3])
    assert texts == [each.expected.ids for each in chats.values()]


def logprobs(engine: Any, jobs: list[MediaJob], **options: Any) -> list[np.ndarray]:
    MediaDriver(engine, **options).run([*jobs])
    return [np.concatenate(job.logprobs) for job in jobs]


def test_native_code_gives_a_text_the_bits_that_it_has_alone(
    folder: Path, chats: dict[str, Chat]
) -> None:
    made = make_engine(folder, "native", **LIMITS)
    params = replace(GREEDY, logprobs=ALL_TOKENS)
    jobs = [each.job(params) for each in chats.values()]
    together = logprobs(made, jobs, chunk_sizes=[40, 9])
    for each, found in zip(chats.values(), together, strict=True):
        (alone,) = logprobs(made, [each.job(params)], chunk_sizes=[13])
        np.testing.assert_array_equal(alone, found)


def test_texts_have_the_bits_of_a_worker_without_images(
    folder: Path, chats: dict[str, Chat]
) -> None:
    params = replace(GREEDY, logprobs=ALL_TOKENS)
    found = []
    for is_text_only in (False, True):
        made = make_engine(folder, "native", language_model_only=is_text_only, **LIMITS)
        assert made.capacity.media == (() if is_text_only else ("image",))
        found += logprobs(made, [chats["none"].job(params)])
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"quantization": "wint8", "embedding_quantization": "wint8"},
        {"kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_pictures_count_in_other_types_of_weights_and_cache(
    folder: Path, chats: dict[str, Chat], settings: dict[str, Any]
) -> None:
    made = make_engine(folder, "native", **LIMITS, **settings)
    texts = texts_of(made, [chats["first"], chats["second"]], chunk_sizes=[9])
    assert texts[0] != texts[1]
    assert texts == texts_of(made, [chats["first"], chats["second"]])


@pytest.mark.parametrize("name", ["two", "image alone"])
def test_a_text_goes_on_where_another_worker_lost_it(
    engine: Any, chats: dict[str, Chat], name: str
) -> None:
    expected = chats[name].expected.ids
    for num_known in (1, 6):
        job = chats[name].job()
        job.emitted = expected[:num_known]
        (text,) = MediaDriver(engine, chunk_sizes=[29]).run([job])
        assert text == expected


def test_a_worker_with_adapters_reads_images_too(folder: Path, chats: dict[str, Chat]) -> None:
    made = make_engine(folder, "native", enable_lora=True, **LIMITS)
    (text,) = texts_of(made, [chats["two"]], chunk_sizes=[30])
    assert text == chats["two"].expected.ids


def test_a_reset_and_a_new_sequence_forget_the_images_of_a_slot(
    engine: Any, chats: dict[str, Chat]
) -> None:
    for name in ("first", "none", "second"):
        (text,) = texts_of(engine, [chats[name]], chunk_sizes=[20])
        assert text == chats[name].expected.ids
        engine.reset()
