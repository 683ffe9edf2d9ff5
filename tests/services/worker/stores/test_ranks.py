"""Ranks with stores of their own: a block is there if all of them have their part."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.layers.parallel import Parallel
from services.worker.stores.ranks import open_in_turn
from shared.errors import ConfigError
from tests.services.worker.checkpoints import save_qwen2
from tests.services.worker.ranks.rank_processes import Case, texts_of_ranks
from tests.services.worker.stores.rank_texts import (
    damaged_texts,
    loaded_texts,
    saved_texts,
)

SETTINGS = {
    "kv_offloading_size": 1 / 64,
    "max_model_len": 128,
    "num_gpu_blocks_override": 64,
    "block_size": 16,
    "speculative_config": {"method": "none"},
}


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.slow)])
def test_ranks_go_on_from_their_parts_of_blocks(kernels: str, tmp_path: Path) -> None:
    """A part that one rank has lost is lost for all."""
    save_qwen2(tmp_path)
    settings = SETTINGS | {"kv_offloading_dir": tmp_path / "kv"}
    runs = {"saved": saved_texts, "loaded": loaded_texts, "damaged": damaged_texts}
    cases = {name: Case(tmp_path, kernels, settings, texts=run) for name, run in runs.items()}
    with texts_of_ranks(cases, 2, tmp_path) as found:
        pass
    wanted = found["saved"][0].ids[0]
    failures = {"saved": 0, "loaded": 0, "damaged": 1}
    for name, num in failures.items():
        assert [each.ids for each in found[name]] == [[wanted, [num]]] * 2, name


class Failing:
    """The group of a rank whose other rank opens no store."""

    def gather(self, part: Tensor) -> Tensor:
        return torch.stack([part, torch.zeros_like(part)])

    def first(self, own: Tensor) -> Tensor:
        return own

    sum = first


def test_a_rank_without_a_store_ends_the_start_of_all() -> None:
    parallel = Parallel(1, 2, Failing())
    with pytest.raises(ConfigError, match="kv-offloading-size: rank 0 has no store"):
        open_in_turn(parallel, lambda named: pytest.fail("it is not its turn"))

    def fail(named: Any) -> Any:
        raise ConfigError("kv-offloading-dir: no room")

    with pytest.raises(ConfigError, match="no room"):
        open_in_turn(Parallel(0, 2, Failing()), fail)
