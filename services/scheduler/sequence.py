"""A sequence: one choice of one prompt, from arrival to end."""

from array import array
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from enum import IntEnum
from math import ceil
from typing import NamedTuple

import numpy as np
from msgspec import Raw

from services.scheduler.allocation import Allocation
from services.scheduler.block_pool import BlockHashes
from shared.errors import CodecError
from shared.wire.envelope import RequestOptions, hash_root, read_options
from shared.wire.faults import reads_all
from shared.wire.messages import (
    ALL_TOKENS,
    WINDOW_BYTES,
    WINDOW_TOKENS,
    Generate,
    Grant,
    Item,
    ResultRow,
    SamplingParams,
    TokenRun,
)
from shared.wire.token_arrays import bytes_of


class WaitReason(IntEnum):
    """The reason a waiting sequence has no slot, or lost its slot.

    The comments name the setting of each limit.
    """

    PLANS_IN_FLIGHT = 0  # the worker has its next plans: pipeline-depth
    SLOTS = 1  # max-num-seqs
    KV_BLOCKS = 2
    STEP_BUDGET = 3  # max-num-batched-tokens
    PARTIAL_PREFILLS = 4  # max-num-partial-prefills
    LONG_PREFILLS = 5  # max-long-partial-prefills
    PREFIX = 6  # another choice computes blocks to share
    PROBATION = 7  # the worker has yet to finish its first steps
    PLACEMENT = 8  # another worker is a better choice
    ISOLATED = 9  # it, or another sequence, runs alone: a worker died under it
    NO_WORKER = 10
    CREDIT = 11  # its client does not read
    PRIORITY = 12  # overtaken by later arrivals, or preempted by an earlier priority
    WORKER_LOST = 13
    HANDED_OVER = 14  # its worker is leaving
    LATER_PRIORITY = 15  # it yields to running sequences: later-priority-share
    PROMISE = 16  # streams decode first: tpot-ms, min-stream-rate
    ADAPTER = 17  # running sequences have other adapters: max-loras
    MEDIA = 18  # images of running sequences are encoded first
    LOADING = 19  # a block to load is lost
    MOVED = 20  # another worker has its blocks

    @property
    def label(self) -> str:
        return self.name.lower()


class Span(NamedTuple):
    """Ids of a prompt that stand for an ``item`` with ``pixels`` [n] uint8."""

    item: Item
    pixels: np.ndarray


@dataclass(slots=True)
class Arrival:
    """A Generate with its buffers: ``prompt`` [prompt_len] int32, shared by its sequences,
    ``emitted`` [n] int32, the ids each has emitted in earlier attempts, concatenated, and the
    ``pixels`` of its items.

    It arrived at ``now_s`` (monotonic) from the tokenizer ``route``. Raises CodecError for bad
    options, and for items that do not fit the prompt or the pixels.
    """

    generate: Generate
    prompt: np.ndarray
    emitted: np.ndarray
    route: int
    now_s: float
    pixels: Series[np.ndarray] = ()
    options: RequestOptions = field(init=False)
    option_row: Raw = field(init=False)
    spans: tuple[Span, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.spans = _spans_of(self.generate.items, self.pixels, len(self.prompt))
        self.option_row = self.generate.options.copy()  # a view would keep the whole header alive
        self.options = read_options(self.option_row)


def _spans_of(items: list[Item], pixels: Series[np.ndarray], prompt_len: int) -> tuple[Span, ...]:
    """``pixels`` are of each different digest, in the order of ``items``."""
    end, left, by_digest = 0, list(pixels), dict[bytes, np.ndarray]()
    for item in items:
        if not end <= item.start < item.end <= prompt_len:
            raise CodecError(
                f"an item from {item.start} to {item.end}; {end} to {prompt_len} is free"
            )
        end = item.end
        if item.digest not in by_digest and left:
            by_digest[item.digest] = left.pop(0)
        if len(by_digest.get(item.digest, ())) != item.num_bytes:
            raise CodecError(f"the item at {item.start} lacks its {item.num_bytes} bytes of pixels")
    if left:
        raise CodecError(f"{len(left)} buffers of pixels belong to no item")
    return tuple(Span(item, by_digest[item.digest]) for item in items)


MAX_WORKER_DEATHS = 2
MAX_FORGIVEN = 8  # a sequence that keeps making workers stand still must end


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """The scheduler's state of a sequence.

    ``order`` is its place in queues, kept when it is requeued. ``route`` names its tokenizer. It
    has an ``allocation`` while it has a slot. ``emitted`` begins with the output of earlier
    attempts. ``last_worker_id`` is None until a worker has run it. ``num_worker_deaths`` includes
    workers of other cells; ``lost_workers`` were lost while they computed it, and ``num_forgiven``
    counts the ones found alive again. ``num_cached`` ids of the prompt were in the prefix cache
    (``note_hit``); ``hits`` has this number for each worker. ``missing_blocks`` has for each worker
    the number of the first block missing in its prefix cache at the last look. Logprobs of
    ``num_prompt_scored`` prompt tokens, from the second on, have arrived. ``num_steps`` counts
    steps with output. ``num_passed_over`` counts plans that admitted, or might have admitted,
    others first, the last time because of ``wait_reason``. ``num_held_back`` counts steps that left
    it out although it had a slot. ``spans`` are the images of the prompt, in order.
    """

    request: str
    attempt: int
    choice: int
    route: int
    order: tuple[float, int]
    prompt: np.ndarray  # [prompt_len] int32
    params: SamplingParams
    emitted: list[int]
    arrived_s: float
    options: RequestOptions
    option_row: Raw  # ``options`` as encoded for the worker
    has_run: bool = False
    allocation: Allocation | None = None
    num_cached: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    is_isolated: bool = field(init=False)
    num_worker_deaths: int = field(init=False)
    lost_workers: list[str] = field(default_factory=list)
    num_forgiven: int = 0
    num_preemptions: int = 0
    last_worker_id: str | None = None
    num_bytes: int = 0
    max_emitted: int = 0
    max_bytes: int = WINDOW_BYTES
    num_prompt_scored: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_passed_over: int = 0
    num_held_back: int = 0
    wait_reason: WaitReason | None = None
    spans: tuple[Span, ...] = ()
    missing_blocks: dict[str, int] = field(default_factory=dict)
    _hashes: BlockHashes | None = None

    def __post_init__(self) -> None:
        self.max_emitted = len(self.emitted) + WINDOW_TOKENS
        self.num_worker_deaths = self.options.num_worker_deaths
        self.is_isolated = self.num_worker_deaths > 0

    @property
    def key(self) -> tuple[str, int]:
        return self.request, self.attempt

    def yields_to(self, other: "Sequence") -> bool:
        """True if ``other`` is of an earlier priority and ahead of it."""
        later = self.options.priority > other.options.priority
        return later and self.order > other.order

    def is_of(self, row: ResultRow) -> bool:
        return row.request == self.request and row.attempt == self.attempt

    @property
    def prompt_key(self) -> tuple[str, int]:
        """A key shared by all choices of a prompt."""
        return self.request.rsplit("/", 1)[0], self.attempt

    @property
    def allocated(self) -> Allocation:
        """The allocation of a sequence with a slot."""
        assert self.allocation is not None
        return self.allocation

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.emitted)

    @property
    def num_expected(self) -> int:
        """The most ids known after the plans in flight. It and ``num_to_compute`` are read several
        times per sequence and plan, so neither calls other properties."""
        allocation, num_known = self.allocation, len(self.prompt) + len(self.emitted)
        return num_known if allocation is None else num_known + allocation.num_pending

    @property
    def num_computed(self) -> int:
        """Ids with KV on its worker; 0 without a worker, since another one recomputes them."""
        return self.allocation.num_computed if self.allocation is not None else 0

    @property
    def num_to_compute(self) -> int:
        allocation, num_known = self.allocation, len(self.prompt) + len(self.emitted)
        if allocation is None:
            return num_known
        return num_known + allocation.num_pending - allocation.num_computed

    @property
    def awaits_data(self) -> bool:
        """True if its worker has yet to encode the image of its next id, or it ``is_held``."""
        allocation = self.allocation
        return allocation is not None and (
            allocation.is_held or allocation.num_computed >= allocation.num_ready
        )

    @property
    def has_credit(self) -> bool:
        """True if its client has taken enough of the output."""
        return len(self.emitted) < self.max_emitted and self.num_bytes < self.max_bytes

    @property
    def may_emit_more(self) -> bool:
        """True if credit and ``max_tokens`` allow one token more than the least number due from
        plans in flight. The worker's state checks the model's length."""
        num_emitted = len(self.emitted) + self.allocated.num_due
        max_tokens = self.params.max_tokens
        return num_emitted < self.max_emitted and (max_tokens is None or num_emitted < max_tokens)

    @property
    def max_cached(self) -> int:
        """The most ids with KV from the prefix cache: without the last one, since its logits are
        needed, without prompt tokens still to be scored, and none if all states of the prompt are
        pooled."""
        if reads_all(self.params):
            return 0
        return self.num_prompt_scored if self._is_scoring else self.num_known - 1

    def max_steps(self, verify_depth: int, vocab_size: int) -> int:
        """The number of steps with ``verify_depth`` drafts that its credit allows beyond the plans
        in flight: in tokens for one token per step, in bytes for the most tokens of a step."""
        allocation = self.allocated
        per_token = sampled_token_bytes(self.params, vocab_size)
        room = self.max_bytes - self.num_bytes - per_token * allocation.num_pending
        num_tokens = self.max_emitted - len(self.emitted) - allocation.num_due
        return min(num_tokens, room // (per_token * (1 + verify_depth)))

    def max_chunk(self, num_to_compute: int, vocab_size: int) -> int:
        """The number of its ``num_to_compute`` ids that may be computed. While a prompt is scored,
        its logprobs, plans in flight included, may exceed the credit in bytes by less than one
        token."""
        if self.params.prompt_logprobs is None or not self._is_scoring:
            return num_to_compute
        room = max(0, self.max_bytes - self.num_bytes)
        num_prompt_scored = self.num_prompt_scored + ceil(
            room / scored_token_bytes(self.params, vocab_size)
        )
        is_rest = num_prompt_scored >= len(self.prompt) - 1
        if is_rest:
            return num_to_compute
        return min(num_to_compute, max(0, num_prompt_scored - self.num_computed))

    @property
    def _is_scoring(self) -> bool:
        is_asked = self.params.prompt_logprobs is not None
        return is_asked and self.num_prompt_scored < len(self.prompt) - 1

    def note_hit(self, worker_id: str, num_tokens: int) -> None:
        """Notes ``num_tokens`` cached ids at its admission.

        The last admission before the first output counts, since that one computes the prompt. Of
        several admissions to one worker the smallest number counts: more may be the sequence's own
        work.
        """
        if not self.num_bytes:
            num_tokens = min(num_tokens, len(self.prompt), self.hits.get(worker_id, num_tokens))
            self.num_cached = self.hits[worker_id] = num_tokens

    def grant(self, grant: Grant) -> None:
        self.max_emitted = max(self.max_emitted, grant.num_tokens)
        self.max_bytes = max(self.max_bytes, grant.num_bytes)

    def add_prompt_logprobs(self, run: TokenRun) -> None:
        self.num_prompt_scored += run.num_tokens
        self.num_bytes += bytes_of(run)

    def emit(self, run: TokenRun, ids: list[int]) -> None:
        self.emitted += ids
        self.num_steps += 1
        if run.num_drafts:
            self.num_drafts += run.num_drafts
            self.num_accepted += run.num_accepted
        if self.is_isolated and ids:
            self.is_isolated = False
        self.num_bytes += bytes_of(run)

    def note_worker_death(self, worker_id: str) -> bool:
        """Notes that a worker died while it computed this sequence. Returns True if another worker
        may run it.

        False if the sequence was computed alone and has emitted nothing since, or beyond
        ``MAX_WORKER_DEATHS`` deaths.
        """
        was_alone = self.is_isolated
        self.is_isolated = True
        self.num_worker_deaths += 1
        self.lost_workers.append(worker_id)
        return not was_alone and self.num_worker_deaths <= MAX_WORKER_DEATHS

    def forgive(self, worker: str) -> None:
        """The worker (an instance) stood still and is alive."""
        alive = [each for each in self.lost_workers if instance_of(each) == worker]
        if alive and self.num_forgiven < MAX_FORGIVEN:
            self.num_forgiven += 1
            self.num_worker_deaths -= len(alive)
            self.lost_workers = [each for each in self.lost_workers if each not in alive]
            self.is_isolated = self.is_isolated and self.num_worker_deaths > 0

    def known_ids(self) -> np.ndarray:
        """Prompt and output: [num_known] int32."""
        return np.concatenate([self.prompt, np.array(self.emitted, np.int32)])

    def block_hash(self, number: int, block_size: int) -> bytes:
        """Returns the hash of block ``number``. The block size may differ between workers."""
        if self._hashes is None or self._hashes.block_size != block_size:
            self._hashes = BlockHashes(block_size, hash_root(self.options))
        return self._hashes.block_hash(number, self._content)

    def _content(self, start: int, end: int) -> bytes:
        num_prompt = len(self.prompt)
        of_prompt = self.prompt[start:end].tobytes() if start < num_prompt else b""
        emitted = self.emitted[max(0, start - num_prompt) : max(0, end - num_prompt)]
        content = of_prompt + array("i", emitted).tobytes()
        if self.spans and start < self.spans[-1].item.end:
            content += self._content_of(start, end)
        return content

    def _content_of(self, start: int, end: int) -> bytes:
        """The content of the items between two positions, and their places."""
        items = (span.item for span in self.spans)
        return b"".join(
            item.digest + array("i", [item.start - start]).tobytes()
            for item in items
            if item.start < end and item.end > start
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """``reason`` is the finish reason, ``cancelled``, ``handed_over``, or the code of the error."""

    sequence: Sequence
    reason: str


def instance_of(worker_id: str) -> str:
    """Returns the instance of a worker, without the number of its connection."""
    return worker_id.rpartition("/")[0]


def scored_token_bytes(params: SamplingParams, vocab_size: int) -> int:
    """Returns the most bytes of one scored prompt token: its id, rank and logprob, and the ids and
    logprobs of the most likely tokens."""
    return _token_bytes(params.prompt_logprobs or 0, vocab_size)


def sampled_token_bytes(params: SamplingParams, vocab_size: int) -> int:
    """Returns the most bytes of one sampled token, and of a draft for it if drafts are reported."""
    num_asked = len(params.logprob_token_ids) or params.logprobs
    num_bytes = 4 if num_asked is None else _token_bytes(num_asked, vocab_size)
    return num_bytes + params.draft_logprobs * _token_bytes(0, vocab_size)


def _token_bytes(num_logprobs: int, vocab_size: int) -> int:
    num_numbers = vocab_size if num_logprobs == ALL_TOKENS else 2 * num_logprobs
    return 4 * (3 + num_numbers)
