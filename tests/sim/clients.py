"""Requests of clients, and their results."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np

from services.gateway.chat.serving import accepting
from services.gateway.mesh.job import Job, Prompt
from services.gateway.mesh.mesh import Mesh
from services.gateway.mesh.observer import RequestObserver
from services.gateway.mesh.output_collector import ChoiceUpdate
from shared.errors import RequestError
from shared.wire.envelope import Promise, RequestOptions
from shared.wire.messages import Mark, SamplingParams, TextOptions
from tests.sim.adapters import EVERY
from tests.sim.images import illustrated
from tests.sim.virtual_loop import Process

NUM_JOBS = 64
ACCEPT_S = 60.0
WORDS = ["the", "shoal", "swims", "north", "while", "one", "small", "fish", "waits", "for it"]
STOPS = ["e", " the", "qu", "."]
HAS_IMAGES = 2
"""Of each four kinds this one."""
LONG = 300
"""Tokens of a text that is longer than a client's credit."""


class Choice(NamedTuple):
    """A choice as its client sees it in the end."""

    text: str
    ids: bytes
    logprobs: bytes
    reason: str
    num_tokens: int
    marks: list[Mark]


@dataclass
class Request:
    """One request of a client; ``choices`` are there if it has ended well.

    Its client pauses for ``read_s`` before each read, leaves after ``leaves_s``, and has the
    request ended after ``aborts_s``.
    """

    name: str
    job_number: int
    begun_s: float
    read_s: float = 0.0
    leaves_s: float | None = None
    aborts_s: float | None = None
    is_traced: bool = False
    gateway: Process | None = None
    ended_s: float | None = None
    error: RequestError | None = None
    fault: Exception | None = None
    prompt_ids: list[bytes] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    has_left: bool = False
    num_ends: int = 0

    @property
    def is_lost(self) -> bool:
        """Its gateway died."""
        return not self.num_ends and self.gateway is not None and self.gateway.is_dead

    @property
    def is_open(self) -> bool:
        return not self.num_ends and not self.is_lost


@cache
def job_of(number: int) -> Job:
    """One of ``NUM_JOBS`` kinds; several share their beginning."""
    random = Random(number)
    text = " ".join(WORDS * random.randint(0, 4) + random.choices(WORDS, k=random.randint(1, 9)))
    ids = np.array(random.choices(range(4000), k=random.randint(1, 60)), np.int32)
    ids = np.maximum(ids, 1)  # the placeholder of images is 0
    prompts = [
        Prompt("text", _bytes(text)),
        Prompt("chat", _bytes(f'[{{"role": "user", "content": "{text}"}}]')),
        Prompt("ids", ids),
    ]
    params = SamplingParams(
        seed=number,
        max_tokens=LONG if number % 16 == 0 else random.choice([0, 1, 8, 24, 48, 100, 100]),
        logprobs=random.choice([None, None, 0, 2]),
        prompt_logprobs=random.choice([None, None, None, 1]),
    )
    job = Job(
        model="shoal-tiny",
        prompts=[random.choice(prompts) for _ in range(random.choice([1, 1, 3]))],
        num_choices=1 if number % 16 == 0 else random.choice([1, 1, 3]),
        params=params,
        text=TextOptions(
            stop=random.sample(STOPS, random.choice([0, 0, 1, 2])),
            includes_stop=random.choice([False, True]),
            has_marks=random.choice([False, True]),
        ),
        options=RequestOptions(
            priority=random.choice([0, 0, 3]),
            salt=random.choice(["", "mine"]),
            owner=random.choice(["", "a", "b"]),
        ),
        is_stream=True,
        includes_usage=True,
        is_seeded=random.choice([False, True]),
    )
    promise = random.choice([None, None, Promise(tpot_ms=3), Promise(ttft_ms=1e6, tpot_ms=50)])
    adapter = random.choice(["", "", *(each.digest for each in EVERY)])
    options = msgspec.structs.replace(job.options, promise=promise, adapter=adapter)
    if number % 4 == HAS_IMAGES:
        job = replace(job, prompts=[illustrated(random, each) for each in job.prompts])
    return replace(job, options=options)


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


async def ask(mesh: Mesh, request: Request) -> None:
    """What the gateway's handler does below HTTP, and its client above."""
    job, loop, task = job_of(request.job_number), asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    if request.leaves_s is not None:
        loop.call_later(request.leaves_s, task.cancel)
    if request.aborts_s is not None:
        public_id = request.name.partition("~")[0]
        loop.call_later(request.aborts_s, mesh.abort, {public_id}, job.options.owner)
    try:
        await _ask(mesh, request, job)
    except RequestError as error:
        request.error = error
    except asyncio.CancelledError:
        request.has_left = True
    except Exception as error:
        request.fault = error
    request.num_ends += 1


async def _ask(mesh: Mesh, request: Request, job: Job) -> None:
    await mesh.tokenizers.ready_model()
    updates: list[list[ChoiceUpdate]] = [[] for _ in range(job.total_choices)]
    observer = RequestObserver()
    observer.is_traced = request.is_traced
    with mesh.generate(request.name, job, observer) as collector:
        async with accepting(ACCEPT_S):
            await collector.accepted()
        async for update in collector:
            if request.read_s:
                await asyncio.sleep(request.read_s)
            updates[update.index].append(update)
            collector.consumed(update)
        prompts = collector.prompt_ids
        request.prompt_ids = [b"" if each is None else each.tobytes() for each in prompts]
        request.choices = [_choice(each) for each in updates]


def _choice(updates: list[ChoiceUpdate]) -> Choice:
    ends = [each.finished for each in updates if each.finished is not None]
    assert len(ends) == 1, "it ended not once"
    output = [each for each in updates if not each.of_prompt]
    assert output[-1].finished is not None, "something came after the end"
    return Choice(
        text="".join(each.text for each in updates),
        ids=b"".join(each.arrays.ids.tobytes() for each in output),
        logprobs=b"".join(_logprobs(updates)),
        reason=f"{ends[0].reason} {ends[0].stop_reason}",
        num_tokens=ends[0].num_tokens,
        marks=[mark for each in updates for mark in each.marks],
    )


def _logprobs(updates: list[ChoiceUpdate]) -> Iterator[bytes]:
    for number in (1, 2, 3):
        for each in updates:
            yield each.arrays[number].tobytes()
