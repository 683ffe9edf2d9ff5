"""Workers with images: their memory, and the images they refuse."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from benchmarks.harness.engines import make_engine
from cli.plan.footprint import footprint_of
from services.worker.extension import WorkerCore
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.layers.rope import RotaryEmbedding
from services.worker.layers.stage import Stage
from services.worker.media.addition import make
from services.worker.media.extension import WorkerMedia
from services.worker.media.rotations import Rotations
from services.worker.media.tower_plan import CACHE_BYTES
from services.worker.models.registry import read_model_config
from services.worker.step_thread import StepThread
from services.worker.weights.load import build_model
from shared.errors import CodecError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Admit, Item, SamplingParams, StepPlan
from tests.media.checkpoints import preprocessor
from tests.services.worker.checkpoints import change_config

LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 64}
CPU = torch.device("cpu")


def made(folder: Path, **settings: Any) -> Any:
    config = read_model_config(folder)
    model = build_model(config, torch.float32, torch.device("meta"))
    return make(WorkerConfig(model=folder, **settings), folder, model, torch.float32)


def test_a_model_that_pools_computes_texts_and_says_why(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    preprocessor(folder, tmp_path)
    change_config(tmp_path, hidden_size=64)
    assert made(tmp_path) is not None
    assert not caplog.messages
    assert made(tmp_path, runner="pooling") is None
    (line,) = caplog.messages
    assert "the model pools" in line


def test_a_folder_without_a_preprocessor_is_of_texts(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shutil.copy(folder / "config.json", tmp_path)
    assert made(tmp_path) is None
    assert "preprocessor_config.json" in caplog.text


def test_a_model_of_texts_gets_no_addition(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert made(checkpoint) is None
    assert not caplog.messages


def test_the_memory_of_images_is_planned(folder: Path) -> None:
    """The largest image has 280² pixels, 100 tokens of 4 patches; its features may come on top."""
    added = {}
    for num in (256, 40):
        settings = WorkerConfig(model=folder, dtype="float32", max_model_len=num, kv_transfer=False)
        added[num] = footprint_of(settings, CPU).requirements.added
    weights, kept, largest = added[256].values()
    assert kept == CACHE_BYTES + 100 * 64 * 4
    assert weights > 100_000
    assert largest == 400 * (2 * 1176 + 10 * 32) * 4
    assert [*added[40].values()][2] == largest * 160 // 400


@pytest.mark.parametrize(
    ("folder", "side", "num_embeddings", "num_others"),
    [("qwen3-vl", 16, 3, 2), ("ernie4.5-vl", 14, 1, 1)],
    indirect=["folder"],
)
def test_all_inputs_of_a_token_are_planned(
    folder: Path, side: int, num_embeddings: int, num_others: int
) -> None:
    """Of kept ones, and of a step's on top of embeddings: further features, or marks of images."""
    settings = WorkerConfig(
        model=folder, dtype="float32", kv_transfer=False, max_num_batched_tokens=48
    )
    _, features, _ = footprint_of(settings, CPU).requirements.added.values()
    num_tokens = 280**2 // side**2 // 4
    expected = num_tokens * num_embeddings + 48 * num_others
    assert features == CACHE_BYTES + expected * 64 * 4


@pytest.mark.parametrize(
    ("folder", "of_step", "of_later"),
    [("qwen3-vl", 2 + 2 * 3, 0), ("ernie4.5-vl", 1 + 2, 1)],
    indirect=["folder"],
)
def test_the_first_rank_alone_plans_a_tower(folder: Path, of_step: int, of_later: int) -> None:
    """Ranks that share layers have two copies of a step's features. Later stages have marks."""
    config, settings = read_model_config(folder), WorkerConfig(model=folder)
    added = {}
    for parallel in (Parallel(0, 2), Parallel(1, 2), replace(ALONE, stage=Stage(1, 2))):
        model = build_model(config, torch.float32, torch.device("meta"), parallel)
        found = make(settings, folder, model, torch.float32)
        assert found is not None
        added[parallel] = found.num_bytes(48), found.num_bytes(0)
    (first, first_of_none), (second, _), (later, _) = added.values()
    kept = "images: features, kept and in a step"
    assert first["images: weights of the tower"] > 100_000
    assert first[kept] - first_of_none[kept] == 48 * of_step * 64 * 4
    assert second == {"images: features in a step": 48 * of_step * 64 * 4}
    assert later == {"images: features in a step": 48 * of_later * 64 * 4}


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_tower_is_float32_where_torch_has_slow_products_of_bfloat16(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_fast: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": is_fast})
    model = build_model(read_model_config(folder), torch.float32, torch.device("meta"))
    settings = WorkerConfig(model=folder)
    asked = torch.bfloat16, torch.float32
    made = [make(settings, folder, model, each) for each in asked]
    weights = [next(iter(each.num_bytes(1).values())) for each in made if each is not None]
    assert (weights[0] < weights[1]) is is_fast


def test_dummy_weights_have_a_tower_too(folder: Path) -> None:
    assert make_engine(folder, load_format="dummy", **LIMITS).capacity.media == ("image",)


@pytest.mark.parametrize("is_text_only", [False, True])
async def test_an_image_has_the_tokens_of_its_size(folder: Path, is_text_only: bool) -> None:
    engine = make_engine(folder, language_model_only=is_text_only, **LIMITS)
    extension = WorkerMedia(WorkerCore(WorkerConfig(), engine, StepThread(), list, lambda: None))
    good = Item(start=0, num_tokens=6, size=(1, 56, 84), digest=bytes(16))
    extension.check(plan(), [])
    pixels = [np.zeros(good.num_bytes, np.uint8)]
    if is_text_only:
        with pytest.raises(CodecError, match="this worker computes none"):
            extension.check(plan(good), pixels)
        return
    extension.check(plan(good), pixels)
    video = structs.replace(good, kind="video", start=6, size=(2, 56, 84), digest=bytes([1] * 16))
    both = [np.zeros(each.num_bytes, np.uint8) for each in (good, video)]
    extension.check(plan(good, video), both)
    wrong = [
        structs.replace(good, start=6, num_tokens=5, digest=bytes([1] * 16)),
        structs.replace(good, start=6, size=(2, 56, 84), digest=bytes([1] * 16)),
        structs.replace(good, start=6, size=(1, 55, 84), digest=bytes([1] * 16)),
        structs.replace(video, num_tokens=12),
        structs.replace(video, size=(1, 56, 84)),
        structs.replace(video, size=(3, 56, 84)),
    ]
    for each in wrong:
        with pytest.raises(CodecError, match=r"tokens of (an image|a video) of the size"):
            extension.check(
                plan(good, each), [np.zeros(n, np.uint8) for n in (good.num_bytes, each.num_bytes)]
            )


def plan(*items: Item) -> StepPlan:
    row = Admit(0, "r", 1, 0, 0, 40, 40, 0, SamplingParams(seed=0), [0], items=[*items])
    return StepPlan(1, [], [row], [], [], [])


@pytest.mark.parametrize("axes", [[0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2, 0, 1, 2, 0, 0]], ids=str)
def test_rows_of_equal_axes_match_the_positions(folder: Path, axes: list[int]) -> None:
    config = read_model_config(folder)
    rotary = RotaryEmbedding(config.rope, 16, 32)
    before = rotary.table.clone()
    rotations = Rotations(rotary, axes, num_rows=4)
    positions = torch.tensor([[5, 6, 9], [5, 7, 9], [5, 8, 9]]).numpy()
    assert rotations.rows(positions).tolist() == [5, 32, 9]
    assert rotary.table.shape[1] == 36
    torch.testing.assert_close(rotary.table[:, :32], before, rtol=0, atol=0)
    for column, axis in enumerate(axes * 2):
        expected = before[:, 6 + axis, column]
        torch.testing.assert_close(rotary.table[:, 32, column], expected, rtol=0, atol=0)
    assert rotations.rows(positions[:, ::-1]).tolist() == [9, 32, 5]
