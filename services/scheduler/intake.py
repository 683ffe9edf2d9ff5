"""Checks of Hellos and Generates."""

from collections.abc import Iterable

import numpy as np

from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival
from shared.errors import InvalidRequest, Overloaded
from shared.process.rate import Rate
from shared.wire.faults import ids_fault, params_fault, pooling_fault
from shared.wire.kv_groups import has_windows
from shared.wire.messages import (
    MAX_ADAPTERS,
    MAX_BATCHED_TOKENS,
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_MODEL_LEN,
    MAX_POOLED_SIZE,
    MAX_SEQS,
    MAX_SPECULATIVE_TOKENS,
    MAX_STALL_S,
    MAX_STATES,
    MAX_VOCAB_SIZE,
    Capacity,
    Generate,
    Hello,
    ModelInfo,
    NewSequence,
)
from shared.wire.same_model import difference


class Intake:
    """Adds sequences to ``core`` or refuses them. The rate of ``ends`` gives a refused request its
    retry-after. Times are monotonic."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self.ends = Rate()

    def add(self, arrival: Arrival) -> None:
        """Adds the sequences of a checked arrival, or refuses them, as ``Scheduler.add`` does."""
        try:
            self._core.add(arrival)
        except Overloaded as error:
            if error.retry_after_s is None:
                error.retry_after_s = self.ends.retry_after_s(arrival.now_s)
            raise

    def check(self, arrival: Arrival) -> None:
        """Raises InvalidRequest. Passes everything while no worker is connected: the core refuses
        it then."""
        if not self._core.sequences:
            self.ends.start(arrival.now_s)
        capacities = self._core.capacities
        if capacities:
            vocab_size = max(each.vocab_size for each in capacities)
            max_model_len = max(each.max_model_len for each in capacities)
            pooled_size = max(each.pooled_size for each in capacities)
            check_generate(
                arrival.generate,
                arrival.prompt,
                arrival.emitted,
                vocab_size,
                max_model_len,
                pooled_size,
            )


def check_generate(
    generate: Generate,
    prompt: np.ndarray,
    emitted: np.ndarray,
    vocab_size: int,
    max_model_len: int,
    pooled_size: int,
) -> None:
    """Raises InvalidRequest for a request that no gateway sends. ``prompt`` and ``emitted`` are the
    buffers of ``generate``."""
    if not len(prompt):
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if len({each.request for each in generate.sequences}) < len(generate.sequences):
        raise InvalidRequest(f"two sequences of {generate.request} have the same name")
    num_emitted = sum(each.num_emitted for each in generate.sequences)
    if num_emitted != len(emitted):
        raise InvalidRequest(f"{num_emitted} ids were emitted before, and {len(emitted)} came")
    for ids in (prompt, emitted):
        if fault := ids_fault(ids, vocab_size):
            raise InvalidRequest(f"the prompt or its emitted ids have {fault}", param="prompt")
    fault = params_fault(generate.params, vocab_size)
    if fault := fault or pooling_fault(generate.params, pooled_size):
        raise InvalidRequest(fault)
    max_tokens = generate.params.max_tokens
    end = max_model_len if max_tokens is None else len(prompt) + max_tokens
    for sequence in generate.sequences:
        _check_sequence(sequence, len(prompt), min(end, max_model_len))


def _check_sequence(sequence: NewSequence, prompt_len: int, end: int) -> None:
    if sequence.num_prompt_scored >= prompt_len:
        raise InvalidRequest(
            f"num_prompt_scored is {sequence.num_prompt_scored} of a prompt of {prompt_len} tokens,"
            " the first of which has no logprob"
        )
    if sequence.num_emitted and prompt_len + sequence.num_emitted >= end:
        raise InvalidRequest(
            f"{sequence.num_emitted} tokens were emitted after {prompt_len} of the prompt; the"
            f" sequence is full with {end}"
        )


BOUNDS: dict[str, tuple[float, float]] = {
    "num_blocks": (1, MAX_BLOCKS),
    "block_size": (1, MAX_BLOCK_SIZE),
    "max_num_seqs": (1, MAX_SEQS),
    "max_num_batched_tokens": (1, MAX_BATCHED_TOKENS),
    "num_speculative_tokens": (0, MAX_SPECULATIVE_TOKENS),
    "stall_s": (0.001, MAX_STALL_S),
    "max_model_len": (1, MAX_MODEL_LEN),
    "vocab_size": (1, MAX_VOCAB_SIZE),
    "pooled_size": (0, MAX_POOLED_SIZE),
    "num_states": (0, MAX_STATES),
    "max_adapters": (0, MAX_ADAPTERS),
}
SHARED_FIELDS = ("max_model_len", "vocab_size")


def why_refused(hello: Hello, others: Iterable[Hello]) -> str | None:
    """Returns the reason against the tokenizer or worker of ``hello`` joining ``others``, or
    None."""
    if hello.model is None:
        return "Hello lacks the model"
    if hello.service == "worker":
        problem = _problem_of(hello.capacity, hello.model)
    else:
        problem = _out_of_bounds(hello.model)
    return problem or next(filter(None, (difference(hello, other) for other in others)), None)


def _problem_of(capacity: Capacity | None, model: ModelInfo) -> str | None:
    if capacity is None:
        return "Hello lacks the capacity"
    for field in SHARED_FIELDS:
        value, expected = getattr(capacity, field), getattr(model, field)
        if value != expected:
            return f"{field} of the capacity is {value}, but {expected} of the model"
    pooled_size = model.pooling.size if model.pooling is not None else 0
    if capacity.pooled_size != pooled_size:
        return (
            f"pooled_size of the capacity is {capacity.pooled_size}, but {pooled_size} of the model"
        )
    if any(each.window is None for each in capacity.groups[1:]):
        return "a group of the capacity after the first one has no window"
    if capacity.num_states is not None and has_windows(capacity):
        return "the capacity has groups with windows and states"
    return _out_of_bounds(capacity)


def _out_of_bounds(sizes: Capacity | ModelInfo) -> str | None:
    for field, (least, most) in BOUNDS.items():
        value = getattr(sizes, field, least)
        if value is None:
            continue
        if not least <= value <= most:
            return f"{field} is {value}, which is not between {least} and {most}"
    return None
