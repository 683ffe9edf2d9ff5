"""Images on a CUDA device: texts equal those by transformers and by the CPU, in chunks, after hits,
preemption and drafts. Needs a GPU: `pytest -m gpu`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.engines import make_engine
from services.worker.engine.device.engine import DeviceEngine
from services.worker.media.addition import Media
from services.worker.media.tower import Tower
from tests.gpu.engines import make_cuda_engine
from tests.media.checkpoints import save_checkpoint
from tests.media.families import FAMILIES
from tests.media.references import Reference, reference
from tests.services.worker.device.test_device_groups import STEPS
from tests.services.worker.media import scheduled
from tests.services.worker.media.prompts import Chat, chat, texts_of
from tests.services.worker.media.test_device_engine import (
    COMMON,
    SPECULATION,
    assert_texts_are_the_hosts,
    crowd,
    few_blocks,
    params_of,
)

pytestmark = pytest.mark.gpu

TOLERANCE = 5e-4  # of features in float32, of numbers up to about 10
CUDA = torch.device("cuda")
LARGE = {"max_num_batched_tokens": 256}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl")
    save_checkpoint(folder, family=request.param)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Reference:
    return reference(folder)


@pytest.fixture(scope="module")
def chats(oracle: Reference) -> list[Chat]:
    return crowd(oracle)[:6]


@pytest.fixture(scope="module", params=STEPS)
def engine(request: pytest.FixtureRequest, folder: Path) -> DeviceEngine:
    return make_cuda_engine(folder, **COMMON | LARGE, **STEPS[request.param])


def test_features_are_the_cpus(folder: Path, oracle: Reference) -> None:
    towers = [Tower(folder, torch.float32, device) for device in (CUDA, torch.device("cpu"))]
    for number, (width, height) in enumerate([(2, 2), (5, 3), (8, 8), (1, 6)]):
        pixels = np.array(oracle.picture(number, width, height))[None]
        found, wanted = (tower.features(pixels) for tower in towers)
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), wanted, rtol=TOLERANCE, atol=TOLERANCE)
        again = towers[0].features(pixels)
        torch.testing.assert_close(again, found, rtol=0, atol=0)


@pytest.mark.parametrize("chunk_sizes", [[1], [7], [200], [30, 11, 3]], ids=str)
def test_texts_match_transformers(
    engine: DeviceEngine, chats: list[Chat], chunk_sizes: list[int]
) -> None:
    """Alone and in a crowd."""
    wanted = [each.expected.ids for each in chats]
    small = [min(size, 40) for size in chunk_sizes]  # six at once
    assert texts_of(engine, chats, chunk_sizes=small) == wanted
    for each in chats:
        assert texts_of(engine, [each], chunk_sizes=chunk_sizes) == [each.expected.ids]
        engine.reset()


def test_a_cache_of_prefixes_may_end_anywhere(engine: DeviceEngine, chats: list[Chat]) -> None:
    found = chats[0]
    first, second = found.items
    for num_cached in (first.start + 4, first.end, second.start, second.start + 3, second.end + 1):
        texts_of(engine, [found])
        (text,) = texts_of(engine, [found], num_cached=num_cached, chunk_sizes=[200, 5])
        assert text == found.expected.ids, num_cached


@pytest.mark.parametrize("method", SPECULATION)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_texts_with_few_blocks_are_the_cpus_with_all(
    folder: Path, oracle: Reference, steps: dict[str, Any], method: str
) -> None:
    chats = crowd(oracle)
    common = {**COMMON, "speculative_config": SPECULATION[method]}
    host = make_engine(folder, **common)
    engine = make_cuda_engine(folder, **few_blocks(host), **common, **steps)
    found = scheduled.run(engine, chats, params_of(chats))
    wanted = scheduled.run(host, chats, params_of(chats))
    assert_texts_are_the_hosts(found, wanted, drafts=method != "none")


def test_pictures_count_in_bfloat16(folder: Path, oracle: Reference) -> None:
    made = make_cuda_engine(folder, **COMMON | LARGE, dtype="bfloat16")
    chats = [chat(oracle, oracle.picture(seed, 3, 5), "Describe it.") for seed in range(3)]
    texts = texts_of(made, chats, chunk_sizes=[30])
    assert len({*map(tuple, texts)}) > 1
    assert texts == texts_of(made, chats, chunk_sizes=[30])


def test_features_stay_on_the_device_and_are_planned(folder: Path, oracle: Reference) -> None:
    """The KV cache gets the rest."""
    made = make_cuda_engine(folder, **COMMON, gpu_memory_utilization=0.3)
    (addition,) = made.additions
    assert isinstance(addition, Media)
    one = chat(oracle, oracle.picture(5, 3, 5), "Describe it.")
    assert texts_of(made, [one], chunk_sizes=[40]) == [one.expected.ids]
    kept = [*addition.encoder._features._kept.values()]
    assert kept
    assert all(each.is_cuda for each in kept)
