"""Divides a machine between processes that compute at the same time."""

from collections.abc import Sequence

from shared.process.cores import NumaNode


def place(
    num: int, num_gpus: int, nodes: Sequence[NumaNode], num_cores: int
) -> list[dict[str, str]]:
    """Settings of each of ``num`` processes: threads if several share the cores, and a node if
    there are several nodes and no GPU. A single process gets the whole machine."""
    if num == 1:
        return [{}]
    share = max(1, num_cores // num)
    if num_gpus or len(nodes) < 2:
        return [{"SHOAL_NUM_THREADS": str(share)}] * num
    places = []
    for index in range(num):
        turn = index % len(nodes)
        num_beside = len(range(turn, num, len(nodes)))
        num_threads = max(1, min(share, len(nodes[turn].cores) // num_beside))
        node = str(nodes[turn].number)
        places.append({"SHOAL_NUM_THREADS": str(num_threads), "SHOAL_NUMA_NODE": node})
    return places
