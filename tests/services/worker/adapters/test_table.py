"""Adapters bound to indices, and refusals."""

from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from kernels.adapt import Change
from kernels.adapt.layout import Layout
from services.worker.adapters.sites import LoadedAdapter, LowRank, Part, Site
from services.worker.adapters.table import AdapterMissing, HostTable
from services.worker.layers.linear import Linear
from services.worker.layers.parallel import Rows, Shard
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import Admit, SamplingParams, StepPlan
from tests.services.worker.adapters.made import (
    DIGESTS,
    adapters_of,
    engine_with,
    make_adapter,
    shapes_of,
    texts_of,
)
from tests.services.worker.checkpoints import random_prompts

A, B, C, D = DIGESTS[:4]
NUM_SLOTS, MOST = 6, 2


class Noted:
    """Notes bound adapters."""

    def __init__(self) -> None:
        self.bound: dict[int, Any] = {}

    def pack(self, changes: Sequence[Sequence[Change]]) -> Sequence[Sequence[Change]]:
        return changes

    def bind(self, index: int, adapter: Any) -> None:
        self.bound[index] = adapter

    def lay_out(self, layout: Layout | None) -> None:
        return

    def lay_out_logits(self, layout: Layout | None) -> None:
        return


class World:
    """A table, and slots as an engine keeps them."""

    def __init__(self) -> None:
        self.form, self.is_open = Noted(), np.zeros(NUM_SLOTS, bool)
        linear = Linear(4, {"q": 3, "k": 2})
        parts = {
            "q": Part(0, Shard(0, 3, 3), Shard(0, 4, 4)),
            "k": Part(3, Rows(np.array([5, 1]), 6), Shard(4, 4, 8)),
        }
        self.table = HostTable(
            [Site(linear, parts)],
            self.form,
            self.is_open,
            max_adapters=MOST,
            max_rank=4,
            dtype=torch.bfloat16,
        )
        for digest in (A, B, C):
            self.table.add(loaded(digest))

    def apply(self, admit: dict[int, str], release: Sequence[int] = ()) -> None:
        rows = [
            Admit(
                slot, "r", 0, 0, 0, 1, 1, 0, SamplingParams(seed=0), [],
                options=write_options(RequestOptions(adapter=digest)),
            )
            for slot, digest in admit.items()
        ]  # fmt: skip
        self.table.apply(StepPlan(1, [*release], rows, [], [], []))
        self.is_open[[*release]] = False
        self.is_open[[*admit]] = True

    @property
    def state(self) -> Any:
        return self.table._of_slots.tolist(), [*self.table._bound], dict(self.form.bound)


def loaded(digest: str, **layers: LowRank) -> LoadedAdapter:
    own = LowRank(torch.ones(1, 4).bfloat16(), torch.ones(3, 1).bfloat16())
    return LoadedAdapter(digest, 1, 0, layers or {"q": own})


@pytest.fixture
def world() -> World:
    return World()


def bound(world: World) -> list[str | None]:
    return [*world.table._bound]


def test_an_index_without_open_slots_is_bound_anew(world: World) -> None:
    world.apply({0: A, 1: B, 2: A, 3: ""})
    assert bound(world) == [A, B]
    world.apply({}, release=[1])
    assert bound(world) == [A, B], "it may come again"
    world.apply({4: C})
    assert bound(world) == [A, C]
    world.is_open[[0, 2]] = False  # they end, without a plan
    world.apply({0: B, 5: C})
    assert bound(world) == [B, C]
    assert world.table._of_slots[[0, 4, 5, 3]].tolist() == [0, 1, 1, -1]


def test_a_plan_may_release_and_admit_a_slot_or_an_index(world: World) -> None:
    world.apply({0: A, 1: B})
    world.apply({0: C, 2: B}, release=[0])
    assert bound(world) == [C, B]
    world.apply({0: A})
    assert bound(world) == [A, B], "a sequence that is replaced"


def test_adapters_of_a_plan_keep_their_indices(world: World) -> None:
    world.apply({0: A, 1: B})
    world.apply({}, release=[0, 1])
    world.apply({2: C, 3: B})
    assert bound(world) == [C, B]


def test_too_many_adapters_change_nothing(world: World) -> None:
    world.apply({0: A, 1: ""})
    before = world.state
    with pytest.raises(ValueError, match=r"^max-loras: 3 different adapters at once; .* is 2$"):
        world.apply({2: B, 3: C})
    assert world.state == before
    world.apply({2: B, 3: A})


def test_a_missing_adapter_changes_nothing(world: World) -> None:
    world.apply({0: A})
    before = world.state
    with pytest.raises(AdapterMissing, match=f"adapter {D} is not loaded"):
        world.apply({1: B, 2: D}, release=[0])
    assert world.state == before


def test_a_removed_adapter_stays_until_its_sequences_end(world: World) -> None:
    world.apply({0: A, 1: B})
    world.table.remove(A)
    world.table.remove(B)
    world.apply({}, release=[1])
    assert world.form.bound[0] is not None
    assert world.form.bound[1] is None
    with pytest.raises(AdapterMissing):
        world.apply({2: A})
    assert A not in world.table
    world.table.reset()
    world.is_open[:] = False
    world.apply({})
    assert bound(world) == [None, None]


def test_a_rank_takes_its_rows_and_columns(world: World) -> None:
    a, b = torch.randn(2, 8).bfloat16(), torch.randn(6, 2).bfloat16()
    world.table.add(loaded(D, k=LowRank(a, b)))
    world.apply({0: D})
    ((change,),) = world.form.bound[0]
    assert change.first == 3
    assert torch.equal(change.a, a[:, 4:])
    assert torch.equal(change.b, b[[5, 1]])


@pytest.mark.parametrize(
    ("name", "a", "b", "problem"),
    [
        ("v", (1, 4), (3, 1), "^v: no layer of the model"),
        ("q", (5, 4), (3, 5), "^q: rank 5; max-lora-rank is 4$"),
        ("q", (0, 4), (3, 0), "^q: rank 0"),
        ("q", (1, 5), (3, 1), r"^q: A \[1, 5\] and B \[3, 1\] for 4 inputs and 3 outputs$"),
        ("q", (2, 4), (3, 1), r"^q: A \[2, 4\] and B \[3, 1\]"),
        ("k", (1, 4), (2, 1), r"^k: A .* for 8 inputs and 6 outputs$"),
    ],
)
def test_adapters_of_other_shapes_are_refused(
    world: World, name: str, a: tuple[int, int], b: tuple[int, int], problem: str
) -> None:
    layer = LowRank(torch.zeros(a).bfloat16(), torch.zeros(b).bfloat16())
    with pytest.raises(ValueError, match=problem):
        world.table.add(loaded(D, **{name: layer}))
    assert D not in world.table


def test_another_type_is_refused(world: World) -> None:
    layer = LowRank(torch.zeros(1, 4), torch.zeros(3, 1).bfloat16())
    with pytest.raises(ValueError, match=r"^q: torch.float32 and torch.bfloat16; .*bfloat16$"):
        world.table.add(loaded(D, q=layer))


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_adapters_come_and_go_while_others_run(checkpoint: Path, kernels: str) -> None:
    """More adapters than indices, added by another thread during steps."""
    shapes = shapes_of(checkpoint)
    made = [make_adapter(shapes, digest) for digest in DIGESTS]
    engine = engine_with(checkpoint, kernels, made[:1], max_loras=2)
    table, prompts = adapters_of(engine).table, random_prompts(3)

    def text(digest: str, seed: int) -> Any:
        return texts_of(engine, prompts[2:], [digest], seed=seed)[0][1].tobytes()

    first = text(DIGESTS[0], 1)

    def add_others() -> None:
        for each in made[1:]:
            table.add(each)

    loader = Thread(target=add_others)
    loader.start()
    for seed in range(5):
        assert text(DIGESTS[0], seed) == first
    loader.join()
    each = {digest: text(digest, 2) for digest in DIGESTS}
    assert len({*each.values()}) == len(DIGESTS)
    for digest in DIGESTS[1:]:
        table.remove(digest)
        assert text(DIGESTS[0], 3) == first
    with pytest.raises(AdapterMissing):
        text(DIGESTS[3], 4)
    table.add(made[3])
    assert text(DIGESTS[3], 4) == each[DIGESTS[3]]
