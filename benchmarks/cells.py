"""Pauses of streams while one of several schedulers is killed, and while all are replaced.

Twelve clients stream continuously from real processes: two schedulers, each with a worker. A round
begins with an undisturbed watch. A scheduler is then killed; once another has taken over its
worker, all schedulers are replaced one after another as in docs/operate.md. A pause is the time
between two tokens of a stream, a wait the time from a request to its first token. Outputs are
compared with those of undisturbed streams. Clients and services share the machine.
"""

import argparse
import asyncio
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness.checked_load import Load
from benchmarks.harness.fleet import Fleet, Member, running_fleet
from benchmarks.report import spread, write
from benchmarks.upgrade import Watch, figures

SETTINGS = {"MAX_MODEL_LEN": "512", "NUM_THREADS": "1", "DRAIN_TIMEOUT_S": "10"}
NUM_STREAMS = 12
NUM_TOKENS = 480
WATCH_S = 8.0
SETTLE_S = 2.0  # between two watches, and at the end of a replacement's watch
LOOK_S = 0.05


async def replace(fleet: Fleet, old: Member) -> None:
    new = await fleet.start("scheduler")
    while "state" not in await new.status():
        await asyncio.sleep(LOOK_S)
    await fleet.stop(old)
    await new.until_ready()
    await asyncio.sleep(SETTLE_S)


async def one_round(fleet: Fleet, load: Load) -> dict[str, Watch]:
    with Watch(load) as undisturbed:
        await asyncio.sleep(WATCH_S)
    await asyncio.sleep(SETTLE_S)  # no pause belongs to two watches
    with Watch(load) as killed:
        await fleet.kill(fleet.of("scheduler")[0])
        await asyncio.sleep(WATCH_S)
    await fleet.start("scheduler")
    await fleet.until_ready()
    await asyncio.sleep(SETTLE_S)
    with Watch(load) as replaced:
        for old in fleet.of("scheduler"):
            await replace(fleet, old)
    return {"undisturbed": undisturbed, "one killed": killed, "all replaced": replaced}


async def measure(num_rounds: int, num_schedulers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="shoal-cells-") as folder:
        async with running_fleet(Path(folder), SETTINGS) as fleet:
            await fleet.start_all(
                scheduler=num_schedulers, worker=num_schedulers, tokenizer=2, gateway=1
            )
            (gateway,) = fleet.of("gateway")
            load = Load(NUM_STREAMS, NUM_TOKENS, lambda _: gateway.url)
            await load.learn()
            running = asyncio.create_task(load.run())
            try:
                rounds = [await one_round(fleet, load) for _ in range(num_rounds)]
            finally:
                load.is_over = True
                await running
    usual_s = max(each["undisturbed"].longest_s()["pause"] for each in rounds)
    return {
        "schedulers": num_schedulers,
        "streams": NUM_STREAMS,
        "tokens of a stream": NUM_TOKENS,
        **{
            what: {
                **figures([each[what] for each in rounds]),
                "streams that paused longer than any undisturbed one": spread(
                    [num_paused(load, each[what], usual_s) for each in rounds]
                ),
            }
            for what in rounds[0]
        },
    }


def num_paused(load: Load, watch: Watch, usual_s: float) -> int:
    """The number of open streams with a pause longer than ``usual_s``."""
    return sum(
        any(
            to_s - from_s > usual_s and from_s < watch.end_s and to_s > watch.begin_s
            for from_s, to_s in pairwise(times_s[1:])
        )
        for times_s in load.times_s
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedulers", type=int, default=2)
    options = parser.parse_args()
    write("cells", asyncio.run(measure(options.rounds, options.schedulers)))


if __name__ == "__main__":
    main()
