"""Sizes, tokens and positions of each family are those of transformers."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.media.families import read_family
from shared.media.family import Family, PixelLimits
from shared.wire.messages import Item
from tests.media.checkpoints import MEDIA, preprocessor, save_checkpoint
from tests.media.families import FAMILIES
from tests.media.references import Reference, reference
from tests.services.worker.checkpoints import change_config

SIDES = st.integers(1, 60) | st.integers(1, 9000)
AREAS = st.integers(1, 3000).map(lambda num: num * 784) | st.integers(1, 3_000_000)
MANY = settings(max_examples=100, deadline=None)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    save_checkpoint(folder, family=request.param)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Reference:
    return reference(folder)


@pytest.fixture(scope="module")
def family(folder: Path) -> Family:
    found = read_family(folder)
    assert found is not None
    return found


@MANY
@given(width=SIDES, height=SIDES, areas=st.tuples(AREAS, AREAS))
@example(width=200, height=1, areas=(56 * 56, 280 * 280))
@example(width=201, height=1, areas=(56 * 56, 280 * 280))
@example(width=1, height=27, areas=(1, 384 * 384))
def test_sizes_match_transformers(
    family: Family, oracle: Reference, width: int, height: int, areas: tuple[int, int]
) -> None:
    limits = PixelLimits(min(areas), max(areas))
    resize: Any = vars(sys.modules[type(oracle.images).__module__])["smart_resize"]
    try:
        expected = resize(height, width, oracle.side, *limits[:2])
    except ValueError:
        with pytest.raises(ValueError, match=f"{width} x {height} pixels; one side may be 200"):
            family.fit(width, height, limits)
        return
    size, num_tokens, *_ = family.fit(width, height, limits)
    assert size == (1, *expected)
    assert num_tokens == family.num_tokens(size) == expected[0] * expected[1] // oracle.side**2


def test_a_size_between_two_tokens_has_no_number_of_tokens(
    family: Family, oracle: Reference
) -> None:
    side = oracle.side
    for size in ((1, side, side + 2), (1, side // 2, side), (3, side, side)):
        with pytest.raises(ValueError, match="no image of the model"):
            family.num_tokens(size)


@MANY
@given(
    squares=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=4),
    texts=st.lists(st.integers(1, 6), min_size=5, max_size=5),
)
def test_positions_match_transformers(
    family: Family, oracle: Reference, squares: list[tuple[int, int]], texts: list[int]
) -> None:
    """Those of the prompt, and the next one."""
    items, kinds = [], [0] * texts[0]
    for (rows, columns), text in zip(squares, texts[1:], strict=False):
        size, num = (1, oracle.side * rows, oracle.side * columns), rows * columns
        items.append(Item(start=len(kinds), num_tokens=num, size=size, digest=b""))
        kinds += [1] * num + [0] * text
    of_kinds = torch.tensor([kinds])
    grid = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in squares])
    expected, delta = oracle.model.model.get_rope_index(of_kinds, of_kinds, image_grid_thw=grid)
    found = family.positions(items, len(kinds) + 1)
    assert found[:, :-1].tolist() == expected[:, 0].tolist()
    assert found[:, -1].tolist() == [len(kinds) + int(delta)] * 3


def test_limits_that_the_file_lacks_match_transformers(
    folder: Path, oracle: Reference, tmp_path: Path
) -> None:
    preprocessor(folder, tmp_path, size=None)
    found = read_family(tmp_path)
    assert found is not None
    size = type(oracle.images).size
    assert found.limits[:2] == (size["shortest_edge"], size["longest_edge"])
    preprocessor(folder, tmp_path, size=None, min_pixels=1000, max_pixels=2000)
    found = read_family(tmp_path)
    assert found is not None
    assert found.limits[:2] == (1000, 2000)
    assert found.placeholder == oracle.tokenizer.convert_tokens_to_ids(MEDIA[2])


@pytest.mark.parametrize("changes", [{"do_resize": False}, {"resample": 2}], ids=str)
def test_other_scaling_is_refused(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    preprocessor(folder, tmp_path, **changes)
    with pytest.raises(ConfigError, match=f"preprocessor_config.json: .*{next(iter(changes))}"):
        read_family(tmp_path)


@pytest.mark.parametrize("folder", ["qwen3-vl"], indirect=True)
@pytest.mark.parametrize(("layers", "is_good"), [([], True), ([3, 1], True), ([1, 1], False)])
def test_deep_features_are_of_different_layers(
    folder: Path, tmp_path: Path, layers: list[int], is_good: bool
) -> None:
    preprocessor(folder, tmp_path)
    for indexes, fits in ((layers, is_good), ([*layers, 4], False)):
        vision = FAMILIES["qwen3-vl"].vision | {"deepstack_visual_indexes": indexes}
        change_config(tmp_path, vision_config=vision)
        if fits:
            found = read_family(tmp_path)
            assert found is not None
            assert found.num_embeddings == 1 + len(layers)
            continue
        with pytest.raises(ConfigError, match=r"deepstack_visual_indexes .* tower, 0 to 3"):
            read_family(tmp_path)


def test_a_family_that_is_unknown_has_no_images(folder: Path, tmp_path: Path) -> None:
    preprocessor(folder, tmp_path)
    change_config(tmp_path, architectures=["LlamaForCausalLM"])
    assert read_family(tmp_path) is None
