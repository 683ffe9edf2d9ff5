"""The launches of a step, on a simulated GPU."""

from collections import Counter

import pytest

from benchmarks.gpu.dry_card import Launch
from benchmarks.gpu.shapes import TINY
from benchmarks.gpu.step_launches import Operator, decode_launches, mixed_launches
from kernels.linear import FEW_TOKENS

pytestmark = pytest.mark.timeout(300)  # the first test of a step compiles its kernels
MAX_LEN = 256


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
    assert deep - shallow == {"linear": 2, "addmm_": 2, "to": 2}
