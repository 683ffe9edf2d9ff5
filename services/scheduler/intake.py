"""Checks of Hellos and Generates, and the quarantine of requests that killed workers."""

import logging
from collections.abc import Iterable
from hashlib import blake2b
from math import ceil

import msgspec
import numpy as np

from services.scheduler.metrics import QUARANTINE_REFUSALS, QUARANTINED_REQUESTS
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival, Sequence, Span
from shared.errors import QUARANTINED, InvalidRequest, Overloaded, RequestError
from shared.process.log import client_text
from shared.process.rate import Rate
from shared.wire.envelope import RequestOptions, hash_root
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
    SamplingParams,
)
from shared.wire.same_model import difference

log = logging.getLogger(__name__)


class Intake:
    """Adds sequences to ``core`` or refuses them. The rate of ``ends`` gives a refused request its
    retry-after. Times are monotonic."""

    def __init__(self, core: Scheduler, quarantine_s: float) -> None:
        self._core = core
        self._quarantine = Quarantine(quarantine_s)
        self.ends = Rate()

    def add(self, arrival: Arrival) -> None:
        """Adds the sequences as ``Scheduler.add`` does. Raises RequestError if it refuses them."""
        now_s = arrival.now_s
        if not self._core.sequences:
            self.ends.start(now_s)
        try:
            self._check(arrival)
            params, options = arrival.generate.params, arrival.options
            self._quarantine.check(arrival.prompt, params, options, now_s, arrival.spans)
            self._core.add(arrival)
        except RequestError as error:
            if error.code == QUARANTINED:
                QUARANTINE_REFUSALS.inc()
            if isinstance(error, Overloaded) and error.retry_after_s is None:
                error.retry_after_s = self.ends.retry_after_s(now_s)
            raise

    def quarantine(self, sequence: Sequence, now_s: float) -> None:
        """Refuses requests equal to the request of ``sequence``, under which workers died, for a
        while."""
        QUARANTINED_REQUESTS.inc()
        name = client_text(sequence.request)
        log.warning("workers died under request %s: it is quarantined", name)
        params, options = sequence.params, sequence.options
        self._quarantine.add(sequence.prompt, params, options, now_s, sequence.spans)

    def _check(self, arrival: Arrival) -> None:
        """Passes everything while no worker is connected: the core refuses it then."""
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


MAX_QUARANTINED = 1024


class Quarantine:
    """Requests under which workers died: each new attempt would kill two more. Times are monotonic.
    Pure.

    Requests are equal if their prompt with its items, parameters and ``hash_root`` are. The seed is
    left out, since it differs between attempts unless the client sets it, and so are prompt
    logprobs, since only the first choice asks for them. A new entry beyond ``MAX_QUARANTINED``
    replaces the oldest.
    """

    def __init__(self, quarantine_s: float) -> None:
        self._quarantine_s = quarantine_s
        self._until_s: dict[bytes, float] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._until_s)

    def add(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        options: RequestOptions,
        now_s: float,
        spans: Iterable[Span] = (),
    ) -> None:
        digest = _digest(prompt, params, options, spans)
        self._until_s.pop(digest, None)
        self._until_s[digest] = now_s + self._quarantine_s
        self._drop_old(now_s)

    def check(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        options: RequestOptions,
        now_s: float,
        spans: Iterable[Span] = (),
    ) -> None:
        """Raises InvalidRequest for a quarantined request."""
        self._drop_old(now_s)
        if not self._until_s:
            return
        until_s = self._until_s.get(_digest(prompt, params, options, spans))
        if until_s is None:
            return
        left_s = until_s - now_s
        raise InvalidRequest(
            "workers died while they ran this request, so it is not run again for"
            f" {ceil(left_s)} s (quarantine-s = {self._quarantine_s:g})",
            code=QUARANTINED,
            retry_after_s=left_s,
        )

    def _drop_old(self, now_s: float) -> None:
        for digest, until_s in list(self._until_s.items()):
            if until_s > now_s and len(self) <= MAX_QUARANTINED:
                return
            del self._until_s[digest]


def _digest(
    prompt: np.ndarray, params: SamplingParams, options: RequestOptions, spans: Iterable[Span]
) -> bytes:
    """``prompt`` [prompt_len] int32."""
    params = msgspec.structs.replace(params, seed=0, prompt_logprobs=None)
    items = [span.item for span in spans]
    header = hash_root(options) + msgspec.msgpack.encode((params, items))
    return blake2b(header + prompt.tobytes(), digest_size=16).digest()
