"""NUMA nodes from the kernel's files, and a process bound to one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.process import cores
from shared.process.cores import NumaNode, bind_to_node, numa_nodes, parse_cpu_list


def make_nodes(monkeypatch: pytest.MonkeyPatch, folder: Path, lists: dict[int, str]) -> None:
    for index, text in lists.items():
        (folder / f"node{index}").mkdir(parents=True)
        (folder / f"node{index}" / "cpulist").write_text(text + "\n")
    (folder / "online").write_text(",".join(map(str, lists)) + "\n")
    monkeypatch.setattr(cores, "NODES", folder)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", set()), ("3", {3}), ("0-2,8", {0, 1, 2, 8}), ("0-1,4-5", {0, 1, 4, 5})],
)
def test_cpu_lists(text: str, expected: set[int]) -> None:
    assert parse_cpu_list(text) == expected


def test_nodes_without_available_cores_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_nodes(monkeypatch, tmp_path, {0: "0-3", 1: "4-7", 2: ""})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 6})
    assert numa_nodes() == [NumaNode(0, frozenset({1, 2})), NumaNode(1, frozenset({6}))]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {6})
    assert [node.number for node in numa_nodes()] == [1]


def test_a_system_that_tells_of_no_nodes_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cores, "NODES", tmp_path / "nothing")
    assert not numa_nodes()
    with pytest.raises(ConfigError, match="numa-node: 0; the nodes with cores of ours are none"):
        bind_to_node(0)


def test_a_bound_process_and_its_threads_run_on_the_cores_of_the_node(tmp_path: Path) -> None:
    """A made-up node with the lowest of this process's cores."""
    core = min(os.sched_getaffinity(0))
    script = f"""
import os, threading
from pathlib import Path
from shared.process import cores
cores.NODES = Path({str(tmp_path)!r})
cores.bind_to_node(0)
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
thread.start()
thread.join()
assert os.sched_getaffinity(0) == found[0] == {{{core}}}, found
assert cores.num_cores() == 1
"""
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text(f"{core}\n")
    (tmp_path / "online").write_text("0\n")
    subprocess.run([sys.executable, "-c", script], check=True)
