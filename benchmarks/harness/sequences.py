"""Makes requests of one sequence and adds them to a scheduler."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import Generate, NewSequence, SamplingParams


def generate_one(
    name: str, params: SamplingParams, attempt: int = 1, num_emitted: int = 0, **options: Any
) -> Generate:
    """``options`` as in RequestOptions."""
    return Generate(
        request=name,
        attempt=attempt,
        params=params,
        sequences=[NewSequence(name, num_emitted=num_emitted)],
        options=write_options(RequestOptions(**options)),
    )


def add_one(
    core: Scheduler,
    name: str,
    prompt: Sequence[int],
    params: SamplingParams,
    now_s: float = 0.0,
    attempt: int = 1,
    **options: Any,
) -> None:
    """``options`` as in RequestOptions."""
    ids = np.array(prompt, np.int32)
    generate = generate_one(name, params, attempt, **options)
    core.add(Arrival(generate=generate, prompt=ids, emitted=ids[:0], route=0, now_s=now_s))
