"""The part of a machine each worker gets, on made-up machines."""

from pathlib import Path

import pytest

from cli import placement
from cli.placement import choose_num_workers, num_gpus
from shared.process.cores import NumaNode
from shared.process.placement import place


def nodes_of(num: int, num_cores: int) -> list[NumaNode]:
    cores = [
        frozenset(range(start, start + num_cores)) for start in range(0, num * num_cores, num_cores)
    ]
    return [NumaNode(index, each) for index, each in enumerate(cores)]


@pytest.mark.parametrize(
    ("num_gpus", "num_nodes", "expected"),
    [(0, 0, 1), (0, 1, 1), (0, 2, 2), (0, 8, 8), (1, 2, 1), (8, 2, 8), (0, 200, 64)],
)
def test_auto_is_a_worker_for_each_gpu_else_for_each_node(
    num_gpus: int, num_nodes: int, expected: int
) -> None:
    assert choose_num_workers(num_gpus, nodes_of(num_nodes, 4)) == expected


def test_each_worker_has_a_node_of_its_own() -> None:
    """Two sockets of 48 cores, each cut into four nodes."""
    places = place(8, 0, nodes_of(8, 12), 96)
    assert [each["SHOAL_NUMA_NODE"] for each in places] == list("01234567")
    assert {each["SHOAL_NUM_THREADS"] for each in places} == {"12"}


def test_workers_that_share_a_node_share_its_cores() -> None:
    places = place(3, 0, nodes_of(2, 32), 64)
    assert [each["SHOAL_NUMA_NODE"] for each in places] == ["0", "1", "0"]
    assert [each["SHOAL_NUM_THREADS"] for each in places] == ["16", "21", "16"]


def test_nodes_that_are_not_numbered_in_a_row_keep_their_numbers() -> None:
    nodes = [NumaNode(0, frozenset(range(8))), NumaNode(2, frozenset(range(8, 16)))]
    assert [each["SHOAL_NUMA_NODE"] for each in place(2, 0, nodes, 16)] == ["0", "2"]


def test_a_quota_below_the_cores_is_shared_too() -> None:
    places = place(2, 0, nodes_of(2, 32), 10)
    assert [each["SHOAL_NUM_THREADS"] for each in places] == ["5", "5"]


def test_a_single_worker_has_the_whole_machine_and_gpus_have_no_node() -> None:
    assert place(1, 0, nodes_of(2, 32), 64) == [{}]
    assert place(2, 2, nodes_of(2, 32), 64) == [{"SHOAL_NUM_THREADS": "32"}] * 2
    assert place(4, 0, nodes_of(1, 2), 2) == [{"SHOAL_NUM_THREADS": "1"}] * 4


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1,2", 3)]
)
def test_only_visible_gpus_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, expected: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(placement, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_gpus() == expected
