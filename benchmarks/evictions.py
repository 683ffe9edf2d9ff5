"""Cached tokens of more chats than a prefix cache has room for, by order of eviction.

The scheduler's core plans for a worker without computation. A chat begins with 960 tokens; each
turn brings 64 tokens and an answer of 96. A chat of more than 2,200 tokens ends, and another one
takes its place. The share refers to the tokens of earlier turns.
"""

import argparse
from collections.abc import Callable, Iterator
from random import Random
from typing import Any
from unittest.mock import patch

from benchmarks.harness.sequences import add_one
from benchmarks.report import write
from cli.plan.simulated_worker import SimulatedWorker
from services.scheduler.eviction import Eviction, Standing
from services.scheduler.scheduler import Scheduler
from shared.wire.messages import Capacity, Group, SamplingParams

FIRST, TURN, ANSWER, LAST = 960, 64, 96, 2200
SIZE = 16
NUM_BLOCKS = 4 * 1600 // SIZE  # four chats of middle length
NUM_TURNS = 1500
SHAPES = {
    "one group": (Group(),),
    "half with a window of 128": (Group(), Group(128)),
}
Pattern = Callable[[Random], Iterator[int]]


def in_turn(num: int) -> Pattern:
    return lambda random: (turn % num for turn in range(NUM_TURNS))


def shuffled(num: int) -> Pattern:
    def pattern(random: Random) -> Iterator[int]:
        for _ in range(NUM_TURNS // num):
            yield from random.sample(range(num), num)

    return pattern


def popular(random: Random) -> Iterator[int]:
    """The next of 30 chats comes as often as the first is of Zipf's law."""
    weights = [1 / (rank + 1) for rank in range(30)]
    return iter(random.choices(range(30), weights, k=NUM_TURNS))


def bursts(random: Random, num: int | None = None) -> Iterator[int]:
    """Four chats at a time, of some turns each; then others, of which there are ``num``."""
    active: dict[int, int] = {}
    num_begun = 0
    for _ in range(NUM_TURNS):
        while len(active) < 4:
            num_begun += 1
            chat = num_begun if num is None else random.randrange(num)
            active.setdefault(chat, random.randint(2, 8))
        chat = random.choice(list(active))
        yield chat
        active[chat] -= 1
        if not active[chat]:
            del active[chat]


PATTERNS: dict[str, Pattern] = {
    "5 chats in turn": in_turn(5),
    "6 chats in turn": in_turn(6),
    "8 chats in turn": in_turn(8),
    "16 chats in turn": in_turn(16),
    "8 chats, each once a round": shuffled(8),
    "30 chats by Zipf's law": popular,
    "4 of 25 chats at a time": lambda random: bursts(random, 25),
    "4 chats at a time, then others": bursts,
}


class NoTimes:
    def seconds(self, num_rows: int, num_cached: int, num_prompt_tokens: int) -> float:
        return 0.0


class Chats:
    """A core with one worker, and the length of each chat."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        capacity = Capacity(NUM_BLOCKS * len(groups), SIZE, 8, 512, 8192, groups=groups)
        self._core = Scheduler(max_waiting=10, priority_step_s=10)
        self._core.add_worker("w", capacity)
        self._worker = SimulatedWorker("w", NoTimes())
        self._ids: dict[int, list[int]] = {}
        self._num_turns = self._num_chats = 0

    def share(self, pattern: Iterator[int]) -> float:
        num_cached = num_known = 0
        for chat in pattern:
            known = self._ids.get(chat, [])
            num_known += len(known)
            num_cached += self._turn(chat, known)
        return num_cached / num_known

    def _turn(self, chat: int, known: list[int]) -> int:
        """Returns its cached tokens."""
        self._num_turns += 1
        self._num_chats += not known
        own = [self._num_chats, *range(1, FIRST)] if not known else [self._num_turns] * TURN
        prompt, name = [*known, *own], str(self._num_turns)
        add_one(self._core, name, prompt, SamplingParams(seed=0, max_tokens=ANSWER))
        sequence = self._core.sequences[name, 1]
        while self._core.sequences:
            while (planned := self._core.plan("w")) is not None:
                self._worker.submit(planned, 0.0)
            self._core.absorb("w", *self._worker.in_flight.popleft())
        length = len(prompt) + ANSWER
        self._ids[chat] = [*prompt, *[0] * ANSWER] if length < LAST else []
        return sequence.num_cached


def measure() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for shape, groups in SHAPES.items():
        for name, pattern in PATTERNS.items():
            ours = Chats(groups).share(pattern(Random(5)))
            with patch.object(Eviction, "standing_of", lambda self, missed: Standing.USUAL):
                recent = Chats(groups).share(pattern(Random(5)))
            row = {"least recently used": round(recent, 3), "as served": round(ours, 3)}
            results.setdefault(shape, {})[name] = row
            print(shape, name, row, flush=True)
    return results


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    write("evictions", measure())
