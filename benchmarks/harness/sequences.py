"""Makes requests of one sequence and adds them to a scheduler."""

from collections.abc import Sequence

import numpy as np

from services.scheduler.scheduler import Scheduler
from shared.wire.messages import Generate, NewSequence, SamplingParams


def generate_one(
    name: str,
    params: SamplingParams,
    attempt: int = 1,
    priority: int = 0,
    salt: str = "",
    num_emitted: int = 0,
) -> Generate:
    new = NewSequence(name, num_emitted=num_emitted)
    return Generate(name, attempt, params, [new], priority, salt)


def add_one(
    core: Scheduler,
    name: str,
    prompt: Sequence[int],
    params: SamplingParams,
    now_s: float = 0.0,
    attempt: int = 1,
    priority: int = 0,
    salt: str = "",
) -> None:
    ids = np.array(prompt, np.int32)
    generate = generate_one(name, params, attempt, priority, salt)
    core.add(generate, ids, ids[:0], 0, now_s)
