"""Sequences of models with windows or states go on at another worker from the bits of a keep
point."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.worker.block_layout.memory import StateMemory
from shared.errors import CodecError
from shared.wire.kv_groups import copy_interval, num_passed
from shared.wire.messages import EVERY_LAYER, MOVED_POINTS_MINOR, Inbox, Part, Push, Take
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.hybrids import save_hybrid
from tests.services.worker.moves.test_moves import ids_of, logprobs_of
from tests.services.worker.moves.worker import (
    MovingWorker,
    key_of,
    plan_of,
    random_ids,
    scheduler,
    working,
)
from tests.services.worker.test_mtp_families import HYBRID_FAMILIES, Checkpoint

MAX_LEN, PROMPT_LEN = 240, 150
POINT = 16 * b"p"
MTP = {"speculative_config": {"method": "mtp", "adaptive": False}}


def family(name: str) -> Callable[[Path], Any]:
    return lambda folder: save_family(folder, name, max_position_embeddings=MAX_LEN)


def hybrid(name: str) -> Callable[[Path], Any]:
    return lambda folder: save_hybrid(folder, name, max_position_embeddings=MAX_LEN)


def with_head(name: str) -> Callable[[Path], Any]:
    family = HYBRID_FAMILIES[name]
    changes = {**family.changes, "max_position_embeddings": MAX_LEN}
    return lambda folder: Checkpoint(replace(family, changes=changes), folder)


BACKENDS: list[Any] = [
    pytest.param(family("GptOssForCausalLM"), "native", {}, id="gpt-oss"),
    pytest.param(family("Gemma3ForCausalLM"), "native", {"kv_cache_dtype": "int8"}, id="gemma 3"),
    pytest.param(family("Lfm2ForCausalLM"), "native", {}, id="lfm2"),
    pytest.param(hybrid("qwen3.5"), "native", {"dtype": "bfloat16"}, id="qwen3.5"),
    pytest.param(with_head("Qwen3.5"), "native", MTP, id="qwen3.5, drafts"),
    pytest.param(hybrid("granite 4, tied"), "native", {}, id="granite 4"),
    pytest.param(hybrid("qwen3.5"), "torch", {}, id="qwen3.5, torch"),
    *(
        pytest.param(save(name), kernels, {}, id=f"{name}, {kernels}", marks=pytest.mark.slow)
        for save, name, kernels in [
            (family, "Gemma4ForCausalLM", "native"),
            (family, "MistralForCausalLM", "torch"),
            (hybrid, "qwen3-next", "native"),
            (hybrid, "nemotron 3", "native"),
            (hybrid, "kimi", "native"),
            (hybrid, "ling 2.5", "native"),
            (hybrid, "kimi", "torch"),
        ]
    ),
]


class Tables:
    """The blocks of a sequence of ``worker`` from block ``first`` on, group by group, the place
    ``copy`` of its state, and the rows that move a point behind ``num_cached`` ids."""

    def __init__(self, worker: MovingWorker, first: int, copy: int, num_cached: int) -> None:
        size = self.size = worker.engine.capacity.block_size
        capacity, num = worker.engine.capacity, MAX_LEN // size
        self.num_cached, self.num_blocks = num_cached, num_cached // size
        self.whole = [
            list(range(first + num * group, first + num * (group + 1)))
            for group in range(len(capacity.groups))
        ]
        self.copy = copy if capacity.num_states is not None else None
        self.num_pieces = worker.part.num_pieces
        self.passed = [num_passed(each, num_cached, size) for each in capacity.groups]
        pairs = zip(self.whole, self.passed, strict=True)
        self.later = [[capacity.num_blocks] * num + blocks[num:] for blocks, num in pairs]

    def units(self) -> list[tuple[int, Part | None]]:
        found: list[tuple[int, Part | None]] = []
        for group, blocks in enumerate(self.whole):
            for number in range(self.passed[group], self.num_blocks):
                part = Part(POINT, self.num_blocks, number, group) if group else None
                found.append((blocks[number], part))
        if self.copy is not None:
            found += [
                (self.copy, Part(POINT, self.num_blocks, piece)) for piece in range(self.num_pieces)
            ]
        return found

    def pushes(self, name: str) -> list[Push]:
        units = enumerate(self.units())
        return [Push(key_of(i), number, name, part) for i, (number, part) in units]

    def takes(self) -> list[Take]:
        return [Take(key_of(i), number, part) for i, (number, part) in enumerate(self.units())]

    def admit(self, tables: list[list[int]], **others: Any) -> dict[str, Any]:
        return {"more_blocks": tables[1:], "to_state": self.copy, **others}


def states_of(worker: MovingWorker) -> StateMemory:
    memory: StateMemory = worker.part._states
    return memory


@pytest.mark.parametrize(("save", "kernels", "settings"), BACKENDS)
async def test_a_sequence_goes_on_at_another_worker_from_a_point(
    save: Callable[[Path], Any], kernels: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path / "model")
    settings = {"max_model_len": MAX_LEN, "num_gpu_blocks_override": 1024, **settings}
    depth = 2 * ("speculative_config" in settings)
    ids, model = random_ids(PROMPT_LEN, 150), tmp_path / "model"
    async with (
        working(model, tmp_path, "a", kernels, **settings) as a,
        working(model, tmp_path, "b", kernels, **settings) as b,
    ):
        capacity = a.engine.capacity
        assert capacity.groups != EVERY_LAYER or capacity.num_states is not None
        num_cached = PROMPT_LEN // copy_interval(capacity.block_size)
        num_cached *= copy_interval(capacity.block_size)
        mine, other = Tables(a, 5, 1, num_cached), Tables(b, 400, 0, num_cached)
        begun = await a.prefill(ids, PROMPT_LEN, mine.whole[0], 0, depth, **mine.admit(mine.whole))
        a.meet(b)
        await a.run(*mine.pushes("b"))
        await b.arrived(len(mine.units()))
        await b.run(*other.takes())
        assert b.num_full == 0
        for (old, part), (new, _) in zip(mine.units(), other.units(), strict=True):
            if part is None or part.group is not None:
                assert b.bytes_of(new) == a.bytes_of(old)
        if mine.copy is not None:
            assert other.copy is not None
            old_state = b"".join(states_of(a).pieces(mine.copy))
            assert b"".join(states_of(b).pieces(other.copy)) == old_state
            assert any(old_state)
        begun += await a.decode(6, depth)
        known = ids + ids_of(begun)
        fields = other.admit(other.later, from_state=other.copy)
        moved = await b.prefill(known, PROMPT_LEN, other.later[0], num_cached, depth, **fields)
        moved += await b.decode(99, depth)
        stayed = await a.decode(99, depth)
        assert ids_of(moved) == ids_of(stayed)
        exact = {"rel": 0, "abs": 0} if kernels == "native" else {"abs": 1e-5}
        assert logprobs_of(moved) == pytest.approx(logprobs_of(stayed), **exact)
        assert bool(b.num_accepted) == bool(depth)


async def test_hostile_pieces_of_states(tmp_path: Path) -> None:
    save_hybrid(tmp_path / "model", "qwen3.5")
    async with working(tmp_path / "model", tmp_path, "a") as worker:
        num_states, num_pieces = worker.engine.capacity.num_states, worker.part.num_pieces
        for copy, piece, why in (
            (num_states, 0, f"state {num_states} that moves; there are {num_states}"),
            (0, num_pieces, f"piece {num_pieces} of a state with {num_pieces}"),
        ):
            row = Take(key_of(0), copy, Part(POINT, 4, piece))
            with pytest.raises(CodecError, match=why):
                worker.moves.check(plan_of(row), [])


@pytest.mark.parametrize("minor", [MOVED_POINTS_MINOR - 1, MOVED_POINTS_MINOR])
async def test_an_older_scheduler_hears_of_no_inbox(minor: int, tmp_path: Path) -> None:
    save_hybrid(tmp_path / "model", "qwen3.5")
    async with working(tmp_path / "model", tmp_path, "a") as worker:
        worker.leave(scheduler(minor))
        assert len(worker.home.take(Inbox)) == (minor == MOVED_POINTS_MINOR)
