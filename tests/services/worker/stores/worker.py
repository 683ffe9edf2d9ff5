"""A worker's engine with a store, and the plans of a scheduler that copies blocks."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.harness.engines import AnyEngine, make_engine
from benchmarks.harness.step_engine import run_step
from kernels.pieces.reference import row_of
from services.worker.block_layout.layout import parts_of
from services.worker.stores.addition import KVStore
from services.worker.stores.part import Row
from shared.wire.messages import (
    FIRST_STATE,
    Admit,
    Copied,
    Decode,
    Load,
    Prefill,
    RunKind,
    SamplingParams,
    Save,
    StepPlan,
)

GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=40, ignore_eos=True)
SIZE = 1 / 64  # GiB
NO_IDS = np.zeros(0, np.int32)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


class StoreWorker:
    """``close`` is its death, as far as others see it."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        kernels: str = "native",
        make: Callable[..., AnyEngine] = make_engine,
        **settings: Any,
    ) -> None:
        options: dict[str, Any] = {
            "kv_offloading_size": SIZE,
            "max_model_len": 128,
            "num_gpu_blocks_override": 64,
            "speculative_config": {"method": "none"},
        }
        options |= {"kv_offloading_dir": folder, **settings}
        self.engine = make(model, kernels, **options)
        (self.addition,) = [each for each in self.engine.additions if isinstance(each, KVStore)]
        self.part = self.addition.part
        is_ahead = hasattr(self.engine, "_segments")
        cache = self.engine._segments.kv_cache if is_ahead else self.engine._kv_cache
        pool = self.engine._states if is_ahead else self.engine._state_pool
        self._sections = [each for each in cache.sections if each.numel()]
        self._states = [part for layer in pool.layers for part in parts_of(layer)]
        self.copied: list[Copied] = []
        self.part.on_copied = self.copied.append
        self.num_accepted = 0
        self._step = 0

    @property
    def store(self) -> str:
        return self.part.own.header.id

    @property
    def block_size(self) -> int:
        size: int = self.engine.capacity.block_size
        return size

    def close(self) -> None:
        self.addition.close()

    def save_state(self, copy: int, place: int = 0) -> Copied:
        """Under the key of the place."""
        return self.copy([Save(key_of(place), copy, FIRST_STATE + place)])

    def load_state(self, copy: int, slot: int, place: int = 0) -> Copied:
        return self.copy([Load(key_of(place), copy, self.store, FIRST_STATE + place, slot)])

    def copy(self, rows: Sequence[Row]) -> Copied:
        """The last report."""
        self._run(rows=list(rows))
        return self.copied[-1]

    def save(self, blocks: Sequence[int], first: int = 0) -> Copied:
        """Block number i goes to place ``first`` + i, under the key of that number."""
        return self.copy(
            [Save(key_of(first + i), each, first + i) for i, each in enumerate(blocks)]
        )

    def load(self, blocks: Sequence[int], store: str | None = None, first: int = 0) -> Copied:
        store = self.store if store is None else store
        rows = [Load(key_of(first + i), each, store, first + i) for i, each in enumerate(blocks)]
        return self.copy(rows)

    @property
    def block_bytes(self) -> int:
        return sum(each[0].nbytes for each in self._sections)

    def bytes_of(self, block: int) -> bytes:
        return row_of(self._sections, block)

    def bytes_of_state(self, copy: int) -> bytes:
        return row_of(self._states, self.engine.capacity.max_num_seqs + copy)

    def clear(self, block: int) -> None:
        for each in self._sections:
            each[block] = 0

    def generate(
        self,
        ids: list[int],
        blocks: list[int],
        *more_blocks: list[int],
        num_cached: int = 0,
        depth: int = 0,
        state: int | None = None,
    ) -> list[int]:
        """The output after ``ids``, of which ``num_cached`` are in the blocks of each group of
        layers; with ``depth`` drafts for each token. Copies of its state go to ``state``."""
        self.admit(ids, blocks, *more_blocks, num_cached=num_cached, state=state)
        return self.finish(len(ids) - num_cached, depth)

    def admit(
        self,
        ids: list[int],
        blocks: list[int],
        *more_blocks: list[int],
        num_cached: int = 0,
        state: int | None = None,
    ) -> None:
        """To slot 0. The state of cached ids is yet to be loaded."""
        row = Admit(0, "r", 1, 0, 0, len(ids), len(ids), num_cached, GREEDY, blocks)
        start = state if num_cached else None
        row = replace(row, more_blocks=[*more_blocks], from_state=start, to_state=state)
        self._run([row], np.array(ids, np.int32))

    def finish(self, num_tokens: int, depth: int = 0) -> list[int]:
        """The output, after the last ``num_tokens`` of the prompt are computed."""
        found, is_over = self._run(prefill=[Prefill(0, num_tokens)], depth=depth)
        while not is_over:
            more, is_over = self._run(decode=[Decode(0, depth)], depth=depth)
            found += more
        self._run(release=[0])
        return found

    def _run(
        self,
        admit: Sequence[Admit] = (),
        ids: np.ndarray = NO_IDS,
        prefill: Sequence[Prefill] = (),
        decode: Sequence[Decode] = (),
        depth: int = 0,
        release: Sequence[int] = (),
        rows: Sequence[Any] = (),
    ) -> tuple[list[int], bool]:
        """The output of a step, and whether the sequence is over."""
        self._step += 1
        plan = StepPlan(
            self._step, [*release], [*admit], [], [*prefill], [*decode], depth, rows=[*rows]
        )
        result, arrays = run_step(self.engine, plan, ids)
        outputs = [row for row in result.rows if row.run.kind == RunKind.OUTPUT]
        self.num_accepted += sum(row.run.num_accepted for row in outputs)
        num = sum(row.run.num_tokens for row in outputs)
        found = arrays[0][-num:].tolist() if num else []
        return found, any(row.finish for row in result.rows)
