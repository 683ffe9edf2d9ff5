"""Growth of memory and descriptors of ``shoal serve`` under an hour of load.

Requests of every kind arrive at a rate that does not depend on answers (open loop, Poisson); some
clients leave early, some send invalid requests. Client and server share the machine's cores. The
worker's memory grows until each block of the prefix cache was written once: some minutes, so a
short soak shows a slope.
"""

import argparse
import asyncio
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import uvloop

from benchmarks import servers
from benchmarks.processes import num_descriptors, own_bytes, parent_of, services_of
from benchmarks.report import write
from benchmarks.soak_plot import plot
from benchmarks.soak_traffic import Traffic

MAX_OPEN = 300
NUM_SAMPLES_TOLD = 180
WARMUP_REQUESTS = 100
SERVICES = ("gateway", "tokenizer", "scheduler", "worker")
MIB = 1 << 20


@dataclass
class Watch:
    """Samples of each process's memory and descriptors; counts restarted processes."""

    traffic: Traffic
    mesh_dir: Path
    started_s: float = field(default_factory=perf_counter)
    samples: list[dict[str, Any]] = field(default_factory=list)
    restarts: Counter[str] = field(default_factory=Counter)
    pids: dict[str, int] = field(default_factory=dict)

    async def run(self, every_s: float) -> None:
        while True:
            # No sample while a service is missing; the next sample counts its restart.
            with suppress(OSError, KeyError):
                self._sample()
            await asyncio.sleep(every_s)

    def _sample(self) -> None:
        services = services_of(self.mesh_dir)
        parent = parent_of(services["gateway"])
        before, self.pids = self.pids, {"serve": parent} | {s: services[s] for s in SERVICES}
        self.restarts.update(name for name in before if before[name] != self.pids[name])
        self.samples.append(
            {
                "s": round(perf_counter() - self.started_s, 1),
                "own_bytes": {name: own_bytes(pid) for name, pid in self.pids.items()},
                "descriptors": {name: num_descriptors(pid) for name, pid in self.pids.items()},
                "open": self.traffic.num_open,
                "ended": self.traffic.ends.total(),
                "errors": self.traffic.errors.total(),
            }
        )

    def figures_of(self, name: str) -> dict[str, Any]:
        own_mib = np.array([each["own_bytes"][name] for each in self.samples]) / MIB
        descriptors = [each["descriptors"][name] for each in self.samples]
        return {
            "own MiB": _first_last_max([round(float(each), 2) for each in own_mib]),
            "own MB/hour in the second half": round(self._mb_per_hour(name), 3),
            "descriptors": _first_last_max(descriptors),
        }

    def _mb_per_hour(self, name: str) -> float:
        """The slope of the least-squares line."""
        half = self.samples[len(self.samples) // 2 :]
        hours = [each["s"] / 3600 for each in half]
        slope, _ = np.polyfit(hours, [each["own_bytes"][name] / 1e6 for each in half], 1)
        return float(slope)

    def thinned(self) -> list[dict[str, Any]]:
        return self.samples[:: max(1, len(self.samples) // NUM_SAMPLES_TOLD)]


def _first_last_max(values: list[Any]) -> dict[str, Any]:
    return {"first": values[0], "last": values[-1], "max": max(values)}


async def soak(minutes: float, rate: float, every_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        mesh_dir = Path(name)
        server = servers.checkout("--mesh-dir", name)
        async with servers.running(server) as url:
            await Traffic(url, MAX_OPEN).run(WARMUP_REQUESTS, rate, seed=1)
            traffic = Traffic(url, MAX_OPEN)
            watch = Watch(traffic, mesh_dir)
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(watch.run(every_s))
                await traffic.run(round(minutes * 60 * rate), rate, seed=0)
                duration_s = perf_counter() - watch.started_s
                watching.cancel()
    return _results(traffic, watch, duration_s)


def _results(traffic: Traffic, watch: Watch, duration_s: float) -> dict[str, Any]:
    return {
        "duration s": round(duration_s, 1),
        "requests ended/s": round(traffic.ends.total() / duration_s, 2),
        "requests by end": dict(traffic.ends),
        "errors": dict(traffic.errors.most_common()),
        "not sent, since so many were open": {str(traffic.max_open): traffic.num_not_sent},
        "most open in a sample": max(each["open"] for each in watch.samples),
        "most seconds a request was sent late": round(traffic.most_late_s, 3),
        "restarts": dict(watch.restarts),
        "services": {name: watch.figures_of(name) for name in watch.pids},
        "samples": watch.thinned(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=60, help="requests/s")
    parser.add_argument("--sample-s", type=float, default=5)
    arguments = parser.parse_args()
    results = uvloop.run(soak(arguments.minutes, arguments.rate, arguments.sample_s))
    write("soak", results)
    plot(results)
