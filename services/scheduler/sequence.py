"""One choice of one prompt, from admission to its end."""

from array import array
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from math import ceil

import numpy as np
from msgspec import Raw

from services.scheduler.block_pool import BlockHashes
from shared.wire.envelope import RequestOptions, hash_root, read_options
from shared.wire.faults import reads_all
from shared.wire.messages import (
    ALL_TOKENS,
    WINDOW_BYTES,
    WINDOW_TOKENS,
    Generate,
    Grant,
    ResultRow,
    SamplingParams,
    TokenRun,
)
from shared.wire.token_arrays import bytes_of


class Obstacle(IntEnum):
    """What keeps a waiting sequence from a slot, or why one had to leave its slot and waits again.

    The names of settings say which limit it is.
    """

    PLANS_IN_FLIGHT = 0  # the worker has its next steps already: pipeline-depth
    SLOTS = 1  # max-num-seqs
    KV_BLOCKS = 2
    STEP_BUDGET = 3  # max-num-batched-tokens
    PARTIAL_PREFILLS = 4  # max-num-partial-prefills
    LONG_PREFILLS = 5  # max-long-partial-prefills
    PREFIX = 6  # another choice fills blocks that it will share
    PROBATION = 7  # the worker has not shown yet that it works
    PLACEMENT = 8  # another worker is to take it
    ISOLATED = 9  # it is computed alone, or another one is: a worker died under it
    NO_WORKER = 10
    CREDIT = 11  # its client has not read what came
    PRIORITY = 12  # others came later and were sooner, or took its slot
    WORKER_LOST = 13
    HANDED_OVER = 14  # its worker leaves
    LATER_PRIORITY = 15  # those that it gives way to are computed: later-priority-share

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(slots=True, eq=False)
class Allocation:
    """A slot and blocks of the worker ``worker_id``, and how far it is with the sequence.

    Plans in flight, the last of which is ``last_step``, bring up to ``num_pending`` ids, and
    ``num_due`` at least unless the sequence ends: one in each step. ``pending`` has for each of
    these plans its steps and the most that it brings. If they bring the most, ``num_computed`` ids
    have their KV in ``blocks`` once those plans have run. The first ``num_indexed`` blocks were
    offered to the worker's index. ``may_have_drafts``: a plan has sampled for the sequence.
    """

    worker_id: str
    slot: int
    blocks: list[int]
    num_indexed: int
    num_computed: int
    num_pending: int = 0
    num_due: int = 0
    pending: deque[tuple[int, int]] = field(default_factory=deque)
    may_have_drafts: bool = False
    last_step: int = 0

    def expect(self, num_steps: int, num_tokens: int) -> None:
        """Notes that a plan samples up to ``num_tokens`` in ``num_steps``, and computes all but the
        last of them."""
        self.may_have_drafts = True
        self.pending.append((num_steps, num_tokens))
        self.num_due += num_steps
        self.num_pending += num_tokens
        self.num_computed += num_tokens - 1

    def receive(self, num_tokens: int) -> None:
        """Notes that the oldest of these plans has brought ``num_tokens``."""
        num_steps, num_expected = self.pending.popleft()
        self.num_due -= num_steps
        self.num_pending -= num_expected
        self.num_computed -= num_expected - num_tokens


@dataclass(slots=True)
class Arrival:
    """A Generate with its buffers: ``prompt`` [prompt_len] int32, which its sequences share, and
    ``emitted`` [n] int32, the ids that each had emitted before, one after the other.

    It came at ``now_s`` (monotonic) from the tokenizer ``route``. Raises CodecError for bad
    options.
    """

    generate: Generate
    prompt: np.ndarray
    emitted: np.ndarray
    route: int
    now_s: float
    options: RequestOptions = field(init=False)
    option_row: Raw = field(init=False)

    def __post_init__(self) -> None:
        self.option_row = self.generate.options.copy()  # or it would keep the whole header
        self.options = read_options(self.option_row)


MAX_WORKER_DEATHS = 2
MAX_FORGIVEN = 8  # a sequence that makes workers stand still, again and again, must end


@dataclass(slots=True, eq=False)
class Sequence:
    """What the scheduler knows of a sequence.

    It came at ``arrived_s``; ``order`` is its place in queues, kept when it has to wait again;
    ``route`` names the tokenizer that it came from. It has an ``allocation`` while it has a slot.
    ``emitted`` begins with what an attempt before this one had emitted. ``last_worker_id`` is None
    as long as no worker has had it. ``num_worker_deaths`` counts other cells' workers too.
    ``num_cached`` of the prompt's ids were in the prefix cache (``note_hit``), and ``hits`` has as
    many for each worker. ``missing_blocks`` gives for each worker the number of its first block
    that was not in the prefix cache at the last look. The logprobs of ``num_prompt_scored`` of the
    prompt's tokens have come, from its second one on.
    ``num_steps`` brought tokens. ``num_passed_over`` times a plan admitted, or might have, others
    first, the last time because of ``obstacle``. While it had a slot ``num_held_back`` plans were
    for those that it gives way to. ``lost_workers`` were lost while they computed it, and
    ``num_forgiven`` times one of them turned out to live.
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
    option_row: Raw  # the same, as it goes to a worker
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
    obstacle: Obstacle | None = None
    missing_blocks: dict[str, int] = field(default_factory=dict)
    _hashes: BlockHashes | None = None

    def __post_init__(self) -> None:
        self.max_emitted = len(self.emitted) + WINDOW_TOKENS
        self.num_worker_deaths = self.options.num_worker_deaths
        self.is_isolated = self.num_worker_deaths > 0

    @property
    def key(self) -> tuple[str, int]:
        return self.request, self.attempt

    def gives_way_to(self, other: "Sequence") -> bool:
        """Whether ``other`` is of an earlier priority, and stands before it."""
        later = self.options.priority > other.options.priority
        return later and self.order > other.order

    def is_of(self, row: ResultRow) -> bool:
        return row.request == self.request and row.attempt == self.attempt

    @property
    def prompt_key(self) -> tuple[str, int]:
        """A key that all choices of a prompt have in common."""
        return self.request.rsplit("/", 1)[0], self.attempt

    @property
    def allocated(self) -> Allocation:
        """The allocation, which a sequence with a slot has."""
        assert self.allocation is not None
        return self.allocation

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.emitted)

    @property
    def num_expected(self) -> int:
        """The most ids that may be known when the plans in flight have run. Like num_to_compute it
        is asked several times for each sequence and plan, and so it asks no other property."""
        allocation, num_known = self.allocation, len(self.prompt) + len(self.emitted)
        return num_known if allocation is None else num_known + allocation.num_pending

    @property
    def num_computed(self) -> int:
        """Ids whose KV its worker has; 0 without a worker, since another computes all anew."""
        return self.allocation.num_computed if self.allocation is not None else 0

    @property
    def num_to_compute(self) -> int:
        allocation, num_known = self.allocation, len(self.prompt) + len(self.emitted)
        if allocation is None:
            return num_known
        return num_known + allocation.num_pending - allocation.num_computed

    @property
    def has_credit(self) -> bool:
        """Whether its client has taken enough of what came before."""
        return len(self.emitted) < self.max_emitted and self.num_bytes < self.max_bytes

    @property
    def may_emit_more(self) -> bool:
        """Whether it has credit for what the plans in flight bring at least and for one token more,
        and may have so many tokens. Its model's length is its worker's matter."""
        num_emitted = len(self.emitted) + self.allocated.num_due
        max_tokens = self.params.max_tokens
        return num_emitted < self.max_emitted and (max_tokens is None or num_emitted < max_tokens)

    @property
    def max_cached(self) -> int:
        """The most ids whose KV may come from the prefix cache: not the last one, whose logits are
        needed, nor prompt tokens that are still to be scored, nor any of a prompt of which all
        states are wanted."""
        if reads_all(self.params):
            return 0
        return self.num_prompt_scored if self._is_scoring else self.num_known - 1

    def max_steps(self, verify_depth: int, vocab_size: int) -> int:
        """How many steps of ``verify_depth`` drafts its credit allows beyond the plans in flight:
        in tokens if each brings one, in bytes if each brings all that it may."""
        allocation = self.allocated
        per_token = sampled_token_bytes(self.params, vocab_size)
        room = self.max_bytes - self.num_bytes - per_token * allocation.num_pending
        num_tokens = self.max_emitted - len(self.emitted) - allocation.num_due
        return min(num_tokens, room // (per_token * (1 + verify_depth)))

    def max_chunk(self, num_to_compute: int, vocab_size: int) -> int:
        """How many of the ``num_to_compute`` ids that it lacks may be computed: of those of a
        prompt that is scored only so many that its logprobs, plans in flight included, exceed the
        credit in bytes by less than one token."""
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
        """Notes that its worker has ``num_tokens`` of it in the prefix cache as it is admitted.

        Of admissions the last before the first output counts, for that one computes it, and of
        several to one worker the least: what is found beyond may be the sequence's own work.
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
        """Notes that a worker died while it computed this sequence, and returns whether another one
        may run it.

        None may if the sequence was computed alone and has emitted nothing since.
        """
        was_alone = self.is_isolated
        self.is_isolated = True
        self.num_worker_deaths += 1
        self.lost_workers.append(worker_id)
        return not was_alone and self.num_worker_deaths <= MAX_WORKER_DEATHS

    def forgive(self, worker: str) -> None:
        """The worker of that instance is not dead: it stood still."""
        alive = [each for each in self.lost_workers if instance_of(each) == worker]
        if alive and self.num_forgiven < MAX_FORGIVEN:
            self.num_forgiven += 1
            self.num_worker_deaths -= len(alive)
            self.lost_workers = [each for each in self.lost_workers if each not in alive]
            self.is_isolated = self.is_isolated and self.num_worker_deaths > 0

    def known_ids(self) -> np.ndarray:
        """The prompt, then what was emitted: [num_known] int32."""
        return np.concatenate([self.prompt, np.array(self.emitted, np.int32)])

    def block_hash(self, number: int, block_size: int) -> bytes:
        """Returns the block hash of block ``number``; blocks of another worker may have another
        size."""
        if self._hashes is None or self._hashes.block_size != block_size:
            self._hashes = BlockHashes(block_size, hash_root(self.options))
        return self._hashes.block_hash(number, self._id_bytes)

    def _id_bytes(self, start: int, end: int) -> bytes:
        num_prompt = len(self.prompt)
        of_prompt = self.prompt[start:end].tobytes() if start < num_prompt else b""
        emitted = self.emitted[max(0, start - num_prompt) : max(0, end - num_prompt)]
        return of_prompt + array("i", emitted).tobytes()


@dataclass(frozen=True, slots=True)
class Ended:
    """``reason`` is the finish reason, ``cancelled``, ``handed_over``, or the code of the error."""

    sequence: Sequence
    reason: str


def instance_of(worker_id: str) -> str:
    """Returns what the process calls itself, without the number of its connection."""
    return worker_id.rpartition("/")[0]


def scored_token_bytes(params: SamplingParams, vocab_size: int) -> int:
    """Returns the most bytes that one scored token of a prompt takes: its id, rank and logprob, and
    the ids and logprobs of the likeliest tokens."""
    return _token_bytes(params.prompt_logprobs or 0, vocab_size)


def sampled_token_bytes(params: SamplingParams, vocab_size: int) -> int:
    """Returns the most bytes that one sampled token takes, with the draft it may have been."""
    num_asked = len(params.logprob_token_ids) or params.logprobs
    num_bytes = 4 if num_asked is None else _token_bytes(num_asked, vocab_size)
    return num_bytes + params.draft_logprobs * _token_bytes(0, vocab_size)


def _token_bytes(num_logprobs: int, vocab_size: int) -> int:
    num_numbers = vocab_size if num_logprobs == ALL_TOKENS else 2 * num_logprobs
    return 4 * (3 + num_numbers)
