"""The launches of a step, on a simulated GPU."""

from collections import Counter
from math import prod

import pytest

from benchmarks.gpu.dry_card import Launch
from benchmarks.gpu.shapes import LATENTS, QWEN3_8B, QWEN3_MOE, TINY, Config
from benchmarks.gpu.step_launches import Operator, decode_launches, mixed_launches
from kernels.linear import FEW_TOKENS
from tests.kernels.compiled import needs_compiler

pytestmark = needs_compiler
MAX_LEN = 256
MIN_PROGRAMS = 64  # half of an H100's processors
FEW_PROGRAMS = {
    "decode_inputs_kernel": "one per sequence",
    "rms_norm_kernel": "one per token",
    "rope_kv_kernel": "one per few heads of a token",
    "route_kernel": "one per token",
    "sum_kernel": "adds the outputs of a token's experts",
    "write_kernel": "one latent per token",
    "rotate_kernel": "one per few heads of a token",
    "product_kernel": "one per head and half of its values",
    "stats_kernel": "one per 2,048 entries of the vocabulary",
    "bins_kernel": "one per 2,048 entries of the vocabulary",
    "gather_kernel": "one per 2,048 entries of the vocabulary",
    "_parts": "one per 2,048 entries of the vocabulary",
    "finish_kernel": "joins the results of the vocabulary",
    "_join": "joins the results of the vocabulary",
    "accept_kernel": "one per sequence",
}
"""Kernels of a step with one token, and the reason for less than ``MIN_PROGRAMS`` programs."""
SMALL_OUTPUT = 576  # of the GEMM that makes a latent and its rotated key


@pytest.fixture(scope="module")
def launches() -> list[Launch | Operator]:
    return decode_launches(TINY, 2, MAX_LEN)


def test_a_layer_is_eight_launches(launches: list[Launch | Operator]) -> None:
    """norm, qkv, rope_kv, attention, o, norm, gates and ups, down."""
    names = Counter(each.model.name for each in launches if isinstance(each, Launch))
    num_layers = TINY["num_hidden_layers"]
    layer = {"linear_kernel": 3, "rms_norm_kernel": 2, "rope_kv_kernel": 1, "decode_kernel": 1}
    layer["gated_kernel"] = 1
    for name in ("linear_kernel", "rms_norm_kernel"):  # also the head's
        assert names[name] == num_layers * layer.pop(name) + 1
    assert {name: names[name] for name in layer} == dict.fromkeys(layer, num_layers)
    assert [each.name for each in launches if isinstance(each, Operator)] == [
        "embedding",
        "index_select",
    ]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(QWEN3_8B, id="dense"),
        pytest.param(QWEN3_MOE, id="experts"),
        pytest.param(LATENTS, id="latents"),
    ],
)
def test_a_launch_for_one_token_has_many_programs(model: Config) -> None:
    launches = decode_launches(model | {"num_hidden_layers": 1}, 1, 4096)
    few = {
        (each.model.name, prod(each.grid))
        for each in launches
        if isinstance(each, Launch) and prod(each.grid) < MIN_PROGRAMS
    }
    if model is LATENTS:
        few.remove(("linear_kernel", SMALL_OUTPUT // 16))
    assert {name for name, _ in few} <= FEW_PROGRAMS.keys(), few


def test_with_a_graph_the_host_launches_no_layer_of_a_step_with_prompts() -> None:
    deeper = TINY | {"num_hidden_layers": TINY["num_hidden_layers"] + 1}
    as_it_comes = [len(mixed_launches(each, 2, [5, 3], MAX_LEN)) for each in (TINY, deeper)]
    in_a_graph = [len(mixed_launches(each, 2, [5, 3], MAX_LEN, 16)) for each in (TINY, deeper)]
    assert as_it_comes[1] - as_it_comes[0] == 9, (
        "rows that decode and prompts have an attention each"
    )
    assert in_a_graph[0] == in_a_graph[1]


def test_products_of_many_tokens_add_to_the_residual_without_a_copy() -> None:
    """All torch operators of a layer: GEMMs (o and down included) with an output of the inputs' own
    dtype."""
    deeper = TINY | {"num_hidden_layers": TINY["num_hidden_layers"] + 1}
    shallow, deep = (
        Counter(
            each.name
            for each in mixed_launches(model, 2, [FEW_TOKENS], MAX_LEN)
            if isinstance(each, Operator)
        )
        for model in (TINY, deeper)
    )
    assert deep - shallow == {"linear": 2, "addmm_": 2}


@pytest.mark.parametrize("num_padded", [None, 16], ids=["as it comes", "in a graph"])
def test_groups_of_layers_need_no_more_launches(num_padded: int | None) -> None:
    plain = TINY | {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 1}
    windowed = plain | {"use_sliding_window": True, "sliding_window": 32}
    one, several = (
        mixed_launches(each, 2, [5, 3], MAX_LEN, num_padded) for each in (plain, windowed)
    )
    assert list(map(_name, several)) == list(map(_name, one))
    launches = (each for each in several if isinstance(each, Launch))
    assert {each.arguments.get("NUM_GROUPS", 3) for each in launches} == {3}


def _name(launch: Launch | Operator) -> str:
    return launch.model.name if isinstance(launch, Launch) else launch.name
