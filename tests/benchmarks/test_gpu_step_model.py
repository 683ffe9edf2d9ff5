"""What is predicted of a step on a card that is not there."""

from collections import Counter

import pytest

from benchmarks.gpu.dry_card import Launch
from benchmarks.gpu.places import beside, residents
from benchmarks.gpu.sass import ARITHMETIC, FENCE, L2, loops, parse, timing
from benchmarks.gpu.shapes import TINY
from benchmarks.gpu.step_launches import Operator, decode_launches, mixed_launches
from benchmarks.gpu.step_model import CARDS, Model, Predicted, with_predictions, work_of
from benchmarks.gpu.switches import changed, changes
from kernels.switches import FEW_TOKENS

pytestmark = pytest.mark.timeout(300)  # the first test of a step compiles its kernels
CONTEXT, MAX_LEN = 200, 256


def sass(*lines: str) -> str:
    """As cuobjdump writes it."""
    return "".join(
        f"  /*{16 * index:04x}*/   {line} ;  /* 0x00 */\n" for index, line in enumerate(lines)
    )


LOOP = sass(
    "LDG.E R4, [R2.64]",
    "FADD R5, R4, 1",
    "FADD R5, R5, R5",  # 2: the loop
    "@P0 BRA 0x20",
    "STG.E [R2.64], R5",
    "EXIT",
    "BRA 0x60",
    "NOP",
)


def test_what_is_loaded_is_waited_for_where_it_is_read() -> None:
    assert timing(parse(LOOP)[:1], ()).clocks == 1
    assert timing(parse(LOOP)[:2], ()).clocks == L2 + 1


def test_a_loop_takes_its_chain_each_time() -> None:
    code = parse(LOOP)
    assert len(code) == 6, "without what is behind the jump to itself"
    assert [(each.first, each.last) for each in loops(code)] == [(2, 3)]
    once, often = timing(code, (1,)), timing(code, (101,))
    assert often.loop_clocks == (ARITHMETIC,)
    assert often.clocks - once.clocks == 100 * ARITHMETIC
    assert often.num_instructions - once.num_instructions == 200


def test_what_is_behind_the_count_is_the_last_programs() -> None:
    code = parse(sass("MEMBAR.SC.GPU", "ATOMG.E.ADD R1, [R2], R3", "IADD3 R4, R1, 1, RZ", "EXIT"))
    found = timing(code, (), ends_at="ATOM")
    assert found.clocks == FENCE + 2
    assert found.last_clocks == L2 + 1


@pytest.fixture(scope="module")
def launches() -> list[Launch | Operator]:
    return decode_launches(TINY, 2, MAX_LEN)


def test_a_layer_is_six_launches(launches: list[Launch | Operator]) -> None:
    """qkv, rope_kv, attention, o, gates and ups, down."""
    names = Counter(each.model.name for each in launches if isinstance(each, Launch))
    num_layers = TINY["num_hidden_layers"]
    layer = {"linear_kernel": 3, "rope_kv_kernel": 1, "decode_kernel": 1, "gated_kernel": 1}
    assert names["linear_kernel"] == num_layers * layer.pop("linear_kernel") + 1
    assert {name: names[name] for name in layer} == dict.fromkeys(layer, num_layers)
    assert [each.name for each in launches if isinstance(each, Operator)] == [
        "embedding",
        "index_select",
    ]


def test_with_a_graph_the_host_launches_no_layer_of_a_step_with_prompts() -> None:
    deeper = TINY | {"num_hidden_layers": TINY["num_hidden_layers"] + 1}
    as_it_comes = [len(mixed_launches(each, 2, [5, 3], MAX_LEN)) for each in (TINY, deeper)]
    in_a_graph = [len(mixed_launches(each, 2, [5, 3], MAX_LEN, 16)) for each in (TINY, deeper)]
    assert as_it_comes[1] - as_it_comes[0] == 7, (
        "rows that decode and prompts have an attention each"
    )
    assert in_a_graph[0] == in_a_graph[1]


def test_products_of_many_tokens_add_to_the_residual_without_a_copy() -> None:
    """All that a layer has of torch's: products, o's and down's among them, of what is asked to
    have the type that it has."""
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


def test_what_a_launch_reads_is_its_weight_or_its_keys(launches: list[Launch | Operator]) -> None:
    works = [
        (each.model.name, work_of(each, CONTEXT)) for each in launches if isinstance(each, Launch)
    ]
    hidden, size, vocab = (
        TINY[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    assert next(work for name, work in works if name == "gated_kernel").num_bytes == (
        2 * size * hidden * 2
    )
    assert [work for name, work in works if name == "linear_kernel"][-1].num_bytes == (
        vocab * hidden * 2
    )
    attention = next(work for name, work in works if name == "decode_kernel")
    heads, head_dim = TINY["num_key_value_heads"], TINY["head_dim"]
    assert attention.num_bytes == 2 * CONTEXT * 2 * heads * head_dim * 2
    assert attention.num_programs == 2 * heads * 2  # 200 keys fill two splits of 128
    assert attention.is_last


def test_each_program_of_a_product_reads_all_tokens_from_the_l2_cache(
    launches: list[Launch | Operator], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = next(
        each for each in launches if isinstance(each, Launch) and each.model.name == "gated_kernel"
    )
    work = work_of(launch, CONTEXT)
    assert work.num_shared_bytes == work.num_programs * 2 * TINY["hidden_size"] * 2
    monkeypatch.setattr("benchmarks.gpu.step_model.L2_GB_PER_S", 1.0)
    step = Model(CARDS["h100"]._replace(read_gb_per_s=1.0), TINY, CONTEXT).step(2)
    found = next(each for each in step if each.kernel == "gated_kernel")
    assert found.memory_us == (work.num_bytes + work.num_shared_bytes) / 1e3


def test_places_of_a_processor_are_those_that_its_memory_and_registers_leave(
    launches: list[Launch | Operator],
) -> None:
    launch = next(each for each in launches if isinstance(each, Launch))
    few = launch.model.resources._replace(num_registers=40, shared_bytes=80 << 10)
    model = launch.model._replace(resources=few)
    assert residents(launch._replace(model=model, num_warps=4)) == 2
    many = few._replace(num_registers=255, shared_bytes=0)
    assert residents(launch._replace(model=model._replace(resources=many), num_warps=8)) == 1


def test_beside_another_a_program_has_what_that_leaves(
    launches: list[Launch | Operator],
) -> None:
    launch = next(each for each in launches if isinstance(each, Launch))
    taken = launch.model.resources._replace(num_registers=40, shared_bytes=80 << 10)
    one = launch._replace(model=launch.model._replace(resources=taken), num_warps=4)
    other = one._replace(grid=(132, 1, 1))
    assert beside(one, other, 132) == 1
    assert beside(one, other._replace(grid=(133, 1, 1)), 132) == 0


def test_a_launch_that_begins_early_takes_less_and_a_product_has_some_of_its_weight() -> None:
    (early,) = (each for each in changes() if each.name == "DEPENDENT_LAUNCHES")
    card = CARDS["h100"]
    model = Model(card, TINY, CONTEXT)
    step = model.step(2)
    with changed(early):
        found = model.step(2)
    assert [each.kernel for each in found] == [each.kernel for each in step]
    faster = [old.us - new.us for old, new in zip(step, found, strict=True)]
    names = [each.kernel for each, less in zip(found, faster, strict=True) if less > 0]
    layer = ["linear_kernel", "rope_kv_kernel", "decode_kernel"]
    layer += ["linear_kernel", "gated_kernel", "linear_kernel"]
    # The first product and the first rotation stand behind operators of torch's.
    behind_ours = layer[2:] + (TINY["num_hidden_layers"] - 1) * layer + ["linear_kernel"]
    assert names == behind_ours
    spared = card.launch_us - card.dependent_us
    by_name = dict(zip((each.kernel for each in found), faster, strict=True))  # the last of each
    assert by_name["rope_kv_kernel"] == pytest.approx(spared, abs=0.01)
    assert by_name["gated_kernel"] > spared + card.latency_us / 2, "its weight does not wait"


def test_a_faster_memory_makes_a_shorter_step_and_a_launch_more_a_longer_one() -> None:
    card = CARDS["h100"]
    slow = card._replace(read_gb_per_s=1.0)
    step = Model(card, TINY, CONTEXT).step(2)
    us = sum(each.us for each in step)
    assert us < sum(each.us for each in Model(slow, TINY, CONTEXT).step(2))
    (separately,) = (each for each in changes() if each.name == "LAST_COMBINES")
    with changed(separately):
        longer = Model(card, TINY, CONTEXT).step(2)
    assert len(longer) == len(step) + TINY["num_hidden_layers"]
    assert sum(each.us for each in longer) > us


def test_a_prefetch_takes_bytes_from_the_next_product_and_time_where_memory_is_not_idle() -> None:
    (prefetching,) = (each for each in changes() if each.value == 8 << 20)
    num_layers = TINY["num_hidden_layers"]
    for read_gb_per_s in (1.0, 3000.0):
        model = Model(CARDS["h100"]._replace(read_gb_per_s=read_gb_per_s), TINY, CONTEXT)
        step = model.step(2)
        with changed(prefetching):
            found = model.step(2)
        waits = [each for each in found if each.kernel == "prefetch_kernel"]
        others = [each for each in found if each.kernel != "prefetch_kernel"]
        assert len(waits) == num_layers
        assert [each.kernel for each in others] == [each.kernel for each in step]
        fewer = [
            new for old, new in zip(step, others, strict=True) if new.memory_us < old.memory_us
        ]
        assert [each.kernel for each in fewer] == ["linear_kernel"] * num_layers
        assert all(each.us > 0 for each in waits) == (read_gb_per_s == 1.0)


def test_a_timeline_has_what_was_predicted_beside_what_was_found() -> None:
    step = [Predicted("product", (8, 1, 1), us, us, 0.0, "memory") for us in (10.0, 20.0)]
    rows = [
        {"kernel": "product", "grid": "[8, 1, 1]", "depth": 0, "us": 12.0},
        {"kernel": "product", "grid": "[9, 1, 1]", "depth": 0, "us": 12.0},
        {"kernel": "product", "grid": "[8, 1, 1]", "depth": 3, "us": 12.0},
        {"kernel": "a step", "depth": 0, "us": 40.0},
    ]
    found = [row.get("predicted_us") for row in with_predictions(rows, step)]
    assert found == [15.0, None, None, 30.0]
