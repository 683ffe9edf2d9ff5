"""ERNIE-4.5-VL: experts of texts and of images, and layouts of its checkpoints."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.harness.engines import ENGINES, make_engine
from services.worker.layers.experts import Experts
from services.worker.media.tower import Sizes, Tower
from services.worker.metrics import EXPERT_LOADS
from services.worker.models.registry import read_model_config
from services.worker.startup.implementations import PARTS
from services.worker.startup.model_shape import count_parameters
from services.worker.weights.load import build_model
from shared.errors import ConfigError
from shared.media.families import read_family
from tests.media.checkpoints import publish_ernie
from tests.media.references import Clip, Reference
from tests.media.videos import processor_of, scene
from tests.selection import only
from tests.services.worker.checkpoints import change_config
from tests.services.worker.media.prompts import (
    GREEDY,
    NUM_TOKENS,
    Chat,
    MediaDriver,
    MediaJob,
    chat,
    texts_of,
)

pytestmark = pytest.mark.parametrize("folder", ["ernie4.5-vl"], indirect=True, scope="session")

LIMITS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 512}
START, END, IMAGE, VIDEO = 259, 260, 261, 262


@pytest.fixture(scope="session")
def chats(oracle: Reference) -> list[Chat]:
    first, second = oracle.picture(1, 3, 5), oracle.picture(2, 7, 2)
    return [
        chat(oracle, "Describe it. ", first, "In one word."),
        chat(oracle, second, " and ", first, ": which is wider?"),
    ]


@pytest.fixture(scope="session")
def film(oracle: Reference) -> Chat:
    frames = scene(4, 6, 3 * oracle.side, 2 * oracle.side)
    return chat(oracle, "What moves? ", Clip(frames), " And here? ", oracle.picture(1, 3, 5))


@pytest.fixture(params=["published", "modules of transformers"])
def other(request: pytest.FixtureRequest, folder: Path, oracle: Reference, tmp_path: Path) -> Path:
    """The checkpoint in another layout."""
    if request.param == "published":
        publish_ernie(folder, tmp_path)
        return tmp_path
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = oracle.model.state_dict()
    del tensors["lm_head.weight"]  # tied
    assert "model.language_model.layers.1.mlp.vision_moe.experts.down_proj" in tensors
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_other_layouts_give_the_same_texts(
    folder: Path, other: Path, chats: list[Chat], film: Chat
) -> None:
    one, another = read_family(folder), read_family(other)
    assert one is not None
    assert another is not None
    assert one.videos is not None
    assert another.videos is not None
    of_files = {"image_ids": (), "videos": None}
    assert vars(one) | of_files == vars(another) | of_files
    assert {START, END, IMAGE} <= {*one.image_ids} & {*another.image_ids}
    is_published = "text_config" not in json.loads((other / "config.json").read_text())
    placeholder = another.videos.placeholder
    assert (one.videos.placeholder, placeholder) == (VIDEO, IMAGE if is_published else VIDEO)
    ids = np.array(film.expected.prompt_ids)
    written = replace(film.expected, prompt_ids=np.where(ids == VIDEO, placeholder, ids).tolist())
    film = Chat(written, film.items, film.pixels)
    engine, crowd = make_engine(other, "torch", **LIMITS), [*chats, film]
    assert texts_of(engine, crowd, chunk_sizes=[30]) == [each.expected.ids for each in crowd]


def test_a_published_tower_is_the_same(folder: Path, tmp_path: Path, chats: list[Chat]) -> None:
    publish_ernie(folder, tmp_path)
    (item,), (pixels,) = chats[0].items, chats[0].pixels.values()
    found, expected = (
        Tower(each, torch.float32).features(pixels.reshape(*item.size, 3))
        for each in (tmp_path, folder)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert Sizes(tmp_path, torch.float32).weights == Sizes(folder, torch.float32).weights


@pytest.mark.parametrize("num_groups", [1, 3])
def test_pairs_of_frames_have_the_features_of_the_whole_video(
    folder: Path, oracle: Reference, num_groups: int
) -> None:
    frames = scene(1, 2 * num_groups, 3 * oracle.side, 2 * oracle.side)
    processor = processor_of("ernie4_5_vl_moe").Ernie4_5_VLMoeVideoProcessor
    values = SimpleNamespace(rescale_and_normalize=normalized)
    pixels = np.stack([np.asarray(frame) for frame in frames])
    given = processor._preprocess(
        values,
        [torch.from_numpy(pixels).permute(0, 3, 1, 2)],
        do_resize=False,
        image_mean=oracle.images.image_mean,
        image_std=oracle.images.image_std,
        patch_size=14,
        merge_size=2,
    )
    with torch.inference_mode():
        (expected,) = oracle.model.get_video_features(**given).pooler_output
    tower = Tower(folder, torch.float32)
    pairs = [tower.features(pixels[start : start + 2]) for start in range(0, len(frames), 2)]
    torch.testing.assert_close(torch.cat(pairs), expected, rtol=1e-5, atol=1e-5)


def normalized(
    frames: Tensor, _: bool, factor: float, __: bool, mean: list[float], std: list[float]
) -> Tensor:
    """As the processor does by torchvision."""
    return (frames * factor - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


@pytest.mark.parametrize("kernels", only([("native",)], ENGINES))
def test_texts_side_by_side_and_after_hits(
    folder: Path, oracle: Reference, chats: list[Chat], film: Chat, kernels: str
) -> None:
    """Hits end within the first item, between its last token and the id after it, and later."""
    engine = make_engine(folder, kernels, **LIMITS)
    crowd = [*chats, film, chat(oracle, "No picture.")]
    expected = [each.expected.ids for each in crowd]
    assert texts_of(engine, crowd, chunk_sizes=[30, 11, 3]) == expected
    first, second = chats[1].items
    for num_cached in (first.start, first.start + 4, first.end, second.start + 9):
        texts_of(engine, crowd[1:2])
        texts = texts_of(engine, crowd[1:2], num_cached=num_cached, chunk_sizes=[7])
        assert texts == expected[1:2], num_cached


def test_a_prompt_of_a_hundred_images(folder: Path, oracle: Reference) -> None:
    pictures = [oracle.picture(seed, 2, 2) for seed in range(100)]
    found = chat(oracle, *pictures, "Which is the brightest?")
    limits = LIMITS | {"max_model_len": 1024, "max_num_batched_tokens": 384}
    engine = make_engine(folder, "native", **limits)
    assert texts_of(engine, [found], chunk_sizes=[384]) == [found.expected.ids]


def continued(oracle: Reference, prompt: list[int], emitted: list[int]) -> list[int]:
    """transformers' text after ids of a prompt and ``emitted`` ones, which are texts."""
    ids = torch.tensor([prompt + emitted])
    kinds = torch.isin(ids, torch.tensor([START, END, IMAGE, VIDEO])).int()
    kinds[:, len(prompt) :] = 0
    with torch.inference_mode():
        found = oracle.model.generate(
            input_ids=ids,
            moe_mm_token_type_ids=kinds,
            mm_token_type_ids=torch.zeros_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS - len(emitted),
        )
    new: list[int] = found[0, len(prompt) :].tolist()
    return new


@pytest.mark.parametrize("kernels", only([("native",)], ENGINES))
def test_ids_of_images_take_their_experts_in_prompts_alone(
    folder: Path, oracle: Reference, kernels: str
) -> None:
    """Without an image, also after ids that were generated before."""
    prompt = [70, START, 80, END, 90, START, 65, 66, 67, 68, START]
    as_text = [65 if each in (START, END) else each for each in prompt]
    engine = make_engine(folder, kernels, **LIMITS)
    texts = []
    for emitted in ([], [START, END, 71]):
        expected = continued(oracle, prompt, emitted)
        for chunk_size in (1, 4, 1000):
            job = MediaJob([*prompt], GREEDY)
            job.emitted = [*emitted]
            (text,) = MediaDriver(engine, chunk_sizes=[chunk_size]).run([job])
            assert text == expected
        texts.append(expected)
    assert continued(oracle, as_text, []) != texts[0]


@pytest.mark.skipif("loads" not in PARTS, reason="loads of experts are not installed")
@pytest.mark.parametrize("kernels", ENGINES)
def test_each_token_counts_for_experts_of_its_kind(
    folder: Path, chats: list[Chat], kernels: str
) -> None:
    engine = make_engine(folder, kernels, enable_expert_distribution_metrics=True, **LIMITS)
    texts = texts_of(engine, chats, chunk_sizes=[11])
    num_images = sum(
        int(np.isin(each.expected.prompt_ids, [START, END, IMAGE]).sum()) for each in chats
    )
    num_all = sum(len(each.expected.prompt_ids) for each in chats)
    num_all += sum(len(text) - 1 for text in texts)  # the last one is not computed
    loads: Any = EXPERT_LOADS.source
    totals = loads._counts.sum(1).tolist()  # of each layer's texts and images, two experts a token
    assert totals == 2 * [2 * (num_all - num_images), 2 * num_images]


def test_a_worker_of_texts_has_no_experts_of_images(folder: Path) -> None:
    config = read_model_config(folder)
    one, other = (
        build_model(each, torch.float32, torch.device("cpu"))
        for each in (config, config.for_texts())
    )
    nums = [sum(isinstance(part, Experts) for part in model.modules()) for model in (one, other)]
    assert nums == [4, 2]
    engine = make_engine(folder, "torch", language_model_only=True, **LIMITS)
    assert not any("images" in name for name, _ in engine._model.model.named_parameters())
    assert count_parameters(one).active == count_parameters(other).active + 2 * (6 * 64 + 6)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"moe_num_experts": [6, 4]}, r"moe_num_experts \[6, 4\] must be equal"),
        ({"moe_intermediate_size": [48]}, r"moe_intermediate_size \[48\] must be two sizes"),
        ({"freq_allocation": 3}, r"\[2, 2, 3\] must be three numbers with the sum 8"),
        ({"rope_scaling": {"mrope_section": [4, 2, 2]}}, "the first two must be equal"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types has 1 layers, the model 3"),
    ],
    ids=str,
)
def test_other_configs_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    publish_ernie(folder, tmp_path)
    read_model_config(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=problem):
        read_model_config(tmp_path)


@pytest.mark.parametrize("kernels", ENGINES)
def test_drafts_of_an_mtp_head_change_no_text(
    folder: Path, tmp_path: Path, chats: list[Chat], kernels: str
) -> None:
    """The head reads placeholders in place of features."""
    publish_ernie(folder, tmp_path)
    file, random = tmp_path / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(file)
    block = {
        name.replace("model.layers.0.", "model.mtp_block.0."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("model.layers.0.")
    }
    norms = {f"model.mtp_{name}_norm.0.weight": torch.ones(64) for name in ("emb", "hidden")}
    proj = {"model.mtp_linear_proj.0.weight": torch.randn(64, 128, generator=random)}
    save_file(tensors | block | norms | proj, file, {"format": "pt"})
    change_config(tmp_path, num_nextn_predict_layers=1)
    config = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    engine = make_engine(tmp_path, kernels, speculative_config=config, **LIMITS)
    assert engine.capacity.num_speculative_tokens == 2
    texts = texts_of(engine, chats, chunk_sizes=[30, 7], depth=2)
    assert texts == [each.expected.ids for each in chats]
