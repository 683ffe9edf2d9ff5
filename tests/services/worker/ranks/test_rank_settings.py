"""The settings of each rank."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from services.worker.ranks import rank_settings
from services.worker.ranks.rank_info import difference, rank_info
from services.worker.ranks.rank_settings import environment_of, shares_of, with_share
from shared.errors import ConfigError
from shared.process.cores import NumaNode
from shared.settings.worker import WorkerConfig
from tests.services.worker.checkpoints import save_model

TWO_HOSTS: dict[str, Any] = {
    "tensor_parallel_size": 4,
    "nnodes": 2,
    "master_addr": "h",
    "insecure_tcp": True,
}
TWO_NODES = [NumaNode(0, frozenset(range(8))), NumaNode(1, frozenset(range(8, 16)))]


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_settings, "num_cores", lambda: 16)
    monkeypatch.setattr(rank_settings, "numa_nodes", lambda: TWO_NODES)


@pytest.mark.usefixtures("sixteen_cores")
def test_ranks_divide_cores_and_take_the_nodes_in_turn(tmp_path: Path) -> None:
    config = WorkerConfig(tensor_parallel_size=4, mesh_dir=tmp_path, admin_port=9000, num_threads=8)
    first = with_share(config)
    assert (first.num_threads, first.numa_node) == (2, 0)
    shares = shares_of(config)
    assert [each["SHOAL_NUMA_NODE"] for each in shares] == ["0", "1", "0", "1"]
    environment = environment_of(config, 1, shares[1], 5)
    assert environment["SHOAL_NUM_THREADS"] == "2"
    assert environment["SHOAL_NUMA_NODE"] == "1"
    assert environment["SHOAL_LEADER"] == config.instance
    assert environment["SHOAL_INSTANCE"] == f"{config.instance}.rank1"
    assert "SHOAL_ADMIN_PORT" not in environment


@pytest.mark.usefixtures("sixteen_cores")
def test_ranks_of_a_worker_on_one_node_stay_there() -> None:
    shares = shares_of(WorkerConfig(tensor_parallel_size=2, numa_node=1))
    assert shares == [{"SHOAL_NUM_THREADS": "4"}] * 2


@pytest.mark.usefixtures("sixteen_cores")
def test_a_host_starts_its_own_ranks_with_all_of_its_cores(tmp_path: Path) -> None:
    config = WorkerConfig(node_rank=1, mesh_dir=tmp_path, num_threads=8, **TWO_HOSTS)
    first = with_share(config)
    assert (first.rank, first.num_threads, first.numa_node) == (2, 4, 0)
    environment = environment_of(config, 3, shares_of(config)[1], 5)
    assert environment["SHOAL_RANK"] == "3"
    assert environment["SHOAL_MASTER_ADDR"] == "h"
    assert environment["SHOAL_INSECURE_TCP"] == "True"
    assert environment["SHOAL_NUMA_NODE"] == "1"


def test_ranks_name_their_differing_settings(tmp_path: Path) -> None:
    ours = rank_info(WorkerConfig(dtype="float32", **TWO_HOSTS))
    there = {"num_threads": 3, "kv_cache_memory_bytes": 1 << 20, "master_addr": "other"}
    theirs = rank_info(WorkerConfig(dtype="float32", node_rank=1, **{**TWO_HOSTS, **there}))
    assert difference(theirs, ours) is None
    save_model(tmp_path, LlamaForCausalLM)
    changes = {"dtype": "float16", "max_num_seqs": 3, "model": tmp_path, "node_rank": 1}
    text = difference(rank_info(WorkerConfig(**{**TWO_HOSTS, **changes})), ours)
    assert text is not None
    assert "dtype is float16, and float32 on the first host" in text
    assert "max-num-seqs is 3, and 128 on the first host" in text
    assert "model is " in text
    assert text.count(";") == 2


@pytest.mark.usefixtures("sixteen_cores")
def test_more_ranks_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"17 ranks, and 16 cores"):
        shares_of(WorkerConfig(tensor_parallel_size=17))


def test_a_worker_alone_keeps_its_settings() -> None:
    config = WorkerConfig(num_threads=3)
    assert with_share(config) == config
