"""Pauses of streams during an upgrade of the stack.

Twelve clients stream continuously through the edge while each service is replaced in turn by the
commands of docs/operate.md, followed by an undisturbed watch of the same length. A pause is the
time between two tokens of a stream, a wait the time from a request to its first token. Outputs are
compared with those of undisturbed streams. Client and stack share the machine.
"""

import argparse
import asyncio
import re
import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

from benchmarks.harness.checked_load import Load
from benchmarks.harness.docker_engine import provide_base_images, running_engine
from benchmarks.harness.stack import Stack, running_stack
from benchmarks.report import spread, write

SERVICES = ("gateway", "tokenizer", "scheduler", "worker")
NUM_STREAMS = 12
NUM_TOKENS = 480
SETTLE_S = 5.0  # part of a replacement's watch after the old container has ended
REFUSED = re.compile(r"StreamError\(.503: ")

Spans = dict[str, tuple[list["Watch"], list["Watch"]]]  # of each service: replaced, undisturbed


class Watch:
    """The load's view of the time within ``with``."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def __enter__(self) -> "Watch":
        self.begin_s = time.monotonic()
        self._before = self._load.num_good, len(self._load.failures), len(self._load.differences)
        return self

    def __exit__(self, *_: object) -> None:
        self.end_s = time.monotonic()
        num_good, num_failed, num_different = self._before
        self.num_ended = self._load.num_good - num_good
        self.failures = self._load.failures[num_failed:]
        self.num_different = len(self._load.differences) - num_different

    @property
    def counts(self) -> dict[str, int]:
        return {
            "requests ended": self.num_ended + len(self.failures),
            "failed": len(self.failures),
            "refused with 503": sum(bool(REFUSED.search(each)) for each in self.failures),
            "other texts": self.num_different,
        }

    def longest_s(self) -> dict[str, float]:
        """To be called after the load: the longest pause and wait that overlap this time."""
        found = {"pause": 0.0, "wait": 0.0}
        for times_s in self._load.times_s:
            for number, (from_s, to_s) in enumerate(pairwise(times_s)):
                if from_s < self.end_s and to_s > self.begin_s:
                    kind = "pause" if number else "wait"
                    found[kind] = max(found[kind], to_s - from_s)
        return found


async def replace_in_turn(stack: Stack, load: Load, num_rounds: int) -> Spans:
    spans: Spans = defaultdict(lambda: ([], []))
    for _ in range(num_rounds):
        for service in SERVICES:
            with Watch(load) as replaced:
                await stack.end_replacement(await stack.begin_replacement(service))
                await asyncio.sleep(SETTLE_S)
            with Watch(load) as undisturbed:
                await asyncio.sleep(replaced.end_s - replaced.begin_s)
            spans[service][0].append(replaced)
            spans[service][1].append(undisturbed)
    return spans


async def measure(
    environment: dict[str, str], num_rounds: int, num_schedulers: int
) -> dict[str, Any]:
    num = str(num_schedulers)
    async with running_stack(environment | {"SCHEDULERS": num, "WORKERS": num}) as stack:
        load = Load(NUM_STREAMS, NUM_TOKENS, lambda _: stack.url)
        await load.learn()
        running = asyncio.create_task(load.run())
        try:
            spans = await replace_in_turn(stack, load, num_rounds)
        finally:
            load.is_over = True
            await running
    return {
        "streams": NUM_STREAMS,
        "tokens of a stream": NUM_TOKENS,
        "schedulers": num_schedulers,
        "services": {
            service: {"replaced": figures(replaced), "undisturbed": figures(undisturbed)}
            for service, (replaced, undisturbed) in spans.items()
        },
    }


def figures(watches: list[Watch]) -> dict[str, Any]:
    counts = [watch.counts for watch in watches]
    longest_s = [watch.longest_s() for watch in watches]
    return {
        **{name: sum(each[name] for each in counts) for name in counts[0]},
        "seconds": spread([watch.end_s - watch.begin_s for watch in watches]),
        **{
            f"longest {kind}, s": spread([each[kind] for each in longest_s])
            for kind in longest_s[0]
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedulers", type=int, default=1, help="and as many workers")
    options = parser.parse_args()
    with running_engine() as environment:
        provide_base_images(environment)
        write("upgrade", asyncio.run(measure(environment, options.rounds, options.schedulers)))


if __name__ == "__main__":
    main()
