"""Memory read bandwidth of all cores, the bound of a step with few streams."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

NUM_BYTES = 1 << 30  # far beyond any cache
NUM_PASSES = 15
METHOD = f"numpy sums int64 from {NUM_BYTES >> 20} MiB, a thread a core, best of {NUM_PASSES}"


def read_bytes_per_s() -> float:
    """The best of several passes: other load on the machine can only slow a pass down."""
    num_cores = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(NUM_BYTES // 8, np.int64), num_cores)
    with ThreadPoolExecutor(num_cores) as pool:
        times_s = []
        for _ in range(NUM_PASSES):
            started_s = time.perf_counter()
            list(pool.map(np.sum, parts))  # releases the GIL
            times_s.append(time.perf_counter() - started_s)
    return NUM_BYTES / min(times_s)


if __name__ == "__main__":
    print(f"{read_bytes_per_s() / 1e9:.1f} GB/s ({METHOD})")
