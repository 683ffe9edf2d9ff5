"""Which part of a machine each of several processes has that compute side by side."""

from collections.abc import Sequence

from shared.process.cores import NumaNode


def place(
    num: int, num_gpus: int, nodes: Sequence[NumaNode], num_cores: int
) -> list[dict[str, str]]:
    """Returns the settings of each of ``num`` processes: its threads where several share the cores,
    and its node where there are several and no GPU computes. A single one has the whole machine."""
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
        places.append(
            {
                "SHOAL_NUM_THREADS": str(num_threads),
                "SHOAL_NUMA_NODE": str(nodes[turn].number),
            }
        )
    return places
