"""Random schedules by number: the contract holds at each event, and every sequence finishes.

The core is driven like in the service, with simulated workers. A number determines its schedule, so
that a failed one can be repeated.
"""

import sys
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from random import Random
from typing import ClassVar
from unittest.mock import patch

import msgspec
import numpy as np

from services.scheduler.block_pool import BlockHashes, KeepPoint
from services.scheduler.prefills import PrefillLimits
from services.scheduler.resource import Resource
from services.scheduler.results import Emission, check_result
from services.scheduler.scheduler import Planned, Refusal, Scheduler
from services.scheduler.sequence import (
    MAX_WORKER_DEATHS,
    Arrival,
    Sequence,
    WaitReason,
    scored_token_bytes,
)
from services.scheduler.worker_state import PROBATION_STEPS, WorkerState
from shared.errors import InvalidRequest, Overloaded, RequestError, Unavailable
from shared.wire.envelope import RequestOptions, hash_root, read_options, write_options
from shared.wire.kv_groups import most_blocks
from shared.wire.messages import (
    EVERY_LAYER,
    WINDOW_TOKENS,
    Capacity,
    Generate,
    Grant,
    Group,
    NewSequence,
    RunKind,
    SamplingParams,
    StepPlan,
)
from shared.wire.token_arrays import Layout, bytes_of
from tests.services.scheduler.simulated_worker import SimulatedWorker, is_stop_id, next_token

MAX_EVENTS = 60
MAX_LEN = 64
VOCAB_SIZE = 1001  # from next_draft
SHARED: tuple[list[int], ...] = ([], [*range(40)], [*range(20)], [7] * 30, [1, *[7] * 24])
WEIGHTS: dict[str, float] = {
    "arrive": 5,
    "plan": 4,
    "absorb": 4,
    "run": 4,
    "read": 3,
    "cancel": 2,
    "join": 1,
    "kill_worker": 1,
    "release_worker": 1,
    "reset_prefix_cache": 0.5,
    "fail_unservable": 0.5,
}


def run_schedule(number: int, kind: "Callable[[Random], Mesh] | None" = None) -> "Mesh":
    """The mesh at the end. Raises AssertionError, with the number in its notes."""
    mesh = (kind or Mesh)(Random(number))
    try:
        with (
            patch("shared.wire.kv_groups.READ_AT_ONCE", mesh.read_at_once),
            patch("shared.wire.kv_groups.COPY_INTERVAL", mesh.copy_interval),
        ):
            for name in _events(mesh.random, mesh.weights):
                mesh.events.append(name)
                getattr(mesh, name)()
                mesh.check()
            mesh.finish()
    except Exception as error:
        error.add_note(f"run_schedule({number}): {' '.join(mesh.events)}")
        raise
    return mesh


def _groups(random: Random) -> tuple[Group, ...]:
    """Often one group of all layers, else groups with windows, with one without or alone."""
    windows = [random.randint(1, 40) for _ in range(random.choice([0, 0, 1, 1, 2, 3]))]
    first = EVERY_LAYER if not windows or random.choice([True, True, False]) else ()
    return (*first, *map(Group, windows))


def _ends_at_cut(sequence: Sequence) -> bool:
    allocation = sequence.allocated
    num = allocation.num_computed
    return any(cut(num - 1, sys.maxsize, sys.maxsize) == num for cut in allocation.cuts)


def _places(sequence: Sequence) -> set[tuple[int, int, int]]:
    """Group, number and block."""
    tables = enumerate(sequence.allocated.tables)
    return {
        (group, number, block)
        for group, table in tables
        for number, block in enumerate(table.blocks, table.num_passed)
    }


def _contexts(ids: list[int]) -> list[int]:
    """What SimulatedWorker has as the KV of ``ids``."""
    context, contexts = 0, []
    for token_id in ids:
        context = hash((context, token_id))
        contexts.append(context)
    return contexts


def _events(random: Random, weights: dict[str, float]) -> list[str]:
    """Each schedule favours some events and lacks others."""
    drawn = [weight * random.choice([0, 1, 1, 5]) for weight in weights.values()]
    num = random.randint(1, MAX_EVENTS)
    return ["arrive", *random.choices([*weights, "arrive"], [*drawn, 1], k=num)]


def expected_text(prompt: list[int], max_tokens: int, stop: int) -> list[int]:
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(next_token(ids))
        if is_stop_id(ids[-1], stop):
            break
    return ids[len(prompt) :]


def names_of(ids: list[int], block_size: int, options: RequestOptions) -> dict[bytes, list[int]]:
    """What SimulatedWorker has up to the end of a block, by the block's name."""
    array, contexts = np.array(ids, np.int32), _contexts(ids)
    names = BlockHashes(block_size, hash_root(options))
    found = {}
    for start in range(0, len(ids) - block_size + 1, block_size):
        name = names.block_hash(start // block_size, lambda start, end: array[start:end].tobytes())
        found[name] = contexts[: start + block_size]
    return found


class Mesh:
    """The methods named in ``weights`` are events. Clients read at ``read`` events; a sequence may
    resume an earlier attempt's output."""

    weights: ClassVar[dict[str, float]] = WEIGHTS

    def __init__(self, random: Random) -> None:
        self.random = random
        self.events: list[str] = []
        num_stages = random.choice([1, 1, 1, 2, 3])
        self.capacity = Capacity(
            num_blocks=random.randint(8, 40),
            block_size=random.choice([1, 4, 16]),
            max_num_seqs=random.randint(1, 6),
            max_num_batched_tokens=random.randint(6, 24),
            max_model_len=MAX_LEN,
            vocab_size=VOCAB_SIZE,
            num_speculative_tokens=random.choice([0, 0, 1, 2, 3, 5]),
            adapts_depth=random.choice([False, True]),
            max_num_steps=1 if num_stages > 1 else random.choice([1, 2, 5]),
            num_stages=num_stages,
            groups=_groups(random),
        )
        if self.capacity.groups == EVERY_LAYER and random.choice([False, True]):
            num_states = random.choice([0, 1, 2, 3, 5, 12])
            self.capacity = msgspec.structs.replace(self.capacity, num_states=num_states)
        self.copy_interval = random.choice([1, 4, 16])
        self.read_at_once = random.choice([1, 4, 16])
        max_partial = random.randint(1, 4)
        max_long, threshold = random.randint(1, max_partial), random.choice([0, 1, 5, 12, MAX_LEN])
        self.limits = PrefillLimits(max_partial, max_long, threshold)
        self.depth, self.stop = random.randint(1, 2), random.choice([0, 4, 15])
        self.stream_rate = random.choice([0, 0.3, 0.8])
        self.core = Scheduler(
            max_waiting=8,
            priority_step_s=1,
            pipeline_depth=self.depth,
            prefill_limits=self.limits,
            priority_share=random.choice([0.05, 0.2, 0.9]),
            stream_rate=self.stream_rate,
        )
        self.owners = ["", "a", "b"][: random.randint(1, 3)]
        self.num_in_turn = 0  # plans made with several waiting owners
        self.workers: dict[str, SimulatedWorker] = {}
        self.results: dict[str, list[tuple]] = {}  # in the order of the plans
        self.expected: dict[str, list[int]] = {}
        self.names: dict[bytes, list[int]] = {}
        self.emitted: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}  # prompts with requested logprobs
        self.told: dict[str, list[int]] = {}
        self.num_bytes: Counter[str] = Counter()
        self.open: set[str] = set()
        self.num_requests = self.num_workers = self.num_overtaken = self.num_given_up = 0
        self.num_long_plans = self.num_long_beside = self.num_cut_short = 0
        self.num_held_back = self.num_joined = 0
        self.num_beside = 0  # plans of a pipeline that decode next to others
        self.num_siblings = self.num_accepted = self.num_rejected = self.num_abandoned = 0
        self.join()

    def join(self) -> None:
        """A worker joins, sometimes with less room than the others."""
        if len(self.workers) < 3:
            self.num_workers += 1
            blocks = self.capacity.num_blocks // self.random.choice([1, 1, 2])
            capacity = msgspec.structs.replace(self.capacity, num_blocks=blocks)
            is_fast = self.random.choice([False, True])
            self.workers[str(self.num_workers)] = SimulatedWorker(
                capacity, self.stop, is_fast=is_fast, repeats=self.random.choice([False, True])
            )
            num_finished = self.random.choice([0, PROBATION_STEPS, PROBATION_STEPS])
            resources = self.resources_of(str(self.num_workers))
            self.core.add_worker(str(self.num_workers), capacity, num_finished, resources)

    def resources_of(self, worker_id: str) -> list[Resource]:
        return []

    def with_variant(self, options: RequestOptions) -> RequestOptions:
        """The options of a new request."""
        return options

    def take_out(self, refusals: list[Refusal]) -> None:
        """A sequence fails only after three deaths or for lack of room everywhere."""
        for refusal in refusals:
            sequence = refusal.sequence
            if isinstance(refusal.error, Unavailable):
                num_tokens = len(sequence.prompt) + sequence.params.max_tokens
                assert not self.fits(num_tokens, sequence.options)
            else:
                assert sequence.is_isolated
                assert 2 <= sequence.num_worker_deaths <= MAX_WORKER_DEATHS + 1
                self.num_given_up += 1
            self.open.remove(sequence.request)

    def fits(self, num_tokens: int, options: RequestOptions) -> bool:
        """True if a connected worker has room for this many tokens."""
        return any(self.fits_on(each, num_tokens, options) for each in self.workers)

    def fits_on(self, worker_id: str, num_tokens: int, options: RequestOptions) -> bool:
        capacity = self.workers[worker_id].capacity
        return num_tokens <= MAX_LEN and most_blocks(capacity, num_tokens) <= capacity.num_blocks

    def arrive(self) -> None:
        """Prompts may share their first ids; prompts of one request are equal."""
        random = self.random
        shared, salt = random.choice(SHARED), random.choice(["", "", "mine"])
        for _ in range(random.randint(1, 4)):
            self.num_requests += 1
            prompt_len, max_tokens = random.randint(1, 40), random.randint(0, 30)
            own = [(self.num_requests * 7 + i) % 50 for i in range(prompt_len)]
            prompt = [*shared, *own][:prompt_len]
            text = expected_text(prompt, max_tokens, self.stop)
            variant = self.with_variant(RequestOptions(salt=salt))
            self.names |= names_of(prompt + text, self.capacity.block_size, variant)
            resumed = text[: max(0, min(random.randint(0, 3), len(text) - 1))]
            num_logprobs = random.choice([None, None, 0, 3])
            params = SamplingParams(0, max_tokens=max_tokens, prompt_logprobs=num_logprobs)
            # No sequence has emitted a token before its prompt was fully scored.
            num_prompt_scored = int(
                (prompt_len - 1) * (1 if resumed else random.choice([0, 0, 0.4, 1]))
            )
            choices = [
                NewSequence(
                    f"r{self.num_requests}/{choice}", choice, len(resumed), num_prompt_scored
                )
                for choice in range(random.choice([1, 1, 3]))
            ]
            name, priority = f"r{self.num_requests}", random.randint(-3, 3)
            owner = self.owners[self.num_requests % len(self.owners)]
            options = msgspec.structs.replace(variant, priority=priority, owner=owner)
            generate = Generate(name, 1, params, choices, options=write_options(options))
            self.add(generate, prompt, text, resumed)

    def add(
        self, generate: Generate, prompt: list[int], text: list[int], resumed: list[int]
    ) -> None:
        options = read_options(generate.options)
        fits = self.fits(len(prompt) + generate.params.max_tokens, options)
        route = self.random.randint(0, 2)
        emitted = resumed * len(generate.sequences)
        ids = np.array(prompt, np.int32), np.array(emitted, np.int32)
        before = dict(self.core.sequences)
        try:
            self.core.add(Arrival(generate, *ids, route, now_s=float(self.num_requests)))
        except RequestError as error:
            match error:
                case Unavailable():
                    assert not self.workers or (options.adapter and not fits)
                case Overloaded():
                    assert len(self.core.queues.waiting) + len(generate.sequences) > 8
                case InvalidRequest():
                    assert not fits
            assert self.core.sequences == before, "all of them are taken, or none"
        else:
            assert fits
            for new in generate.sequences:
                self.open_one(new, generate.params, prompt, text, resumed)

    def open_one(
        self,
        new: NewSequence,
        params: SamplingParams,
        prompt: list[int],
        text: list[int],
        resumed: list[int],
    ) -> None:
        name = new.request
        sequence = self.core.sequences[name, 1]
        assert sequence.max_emitted == len(resumed) + WINDOW_TOKENS
        window = self.random.randint(1, 40)
        sequence.max_emitted = len(resumed) + window
        sequence.max_bytes = 8 * window
        if new.choice == 0 and params.prompt_logprobs is not None:
            self.prompts[name] = prompt
            self.told[name] = prompt[1 : 1 + new.num_prompt_scored]
        self.expected[name] = text
        self.emitted[name] = list(resumed)
        self.open.add(name)
        self.num_siblings += new.choice > 0

    def read(self) -> None:
        if self.open:
            self.grant(self.random.choice(sorted(self.open)), self.random.randint(1, 20))

    def grant(self, name: str, num: int) -> None:
        num_bytes = self.num_bytes[name] + 8 * num
        self.core.grant(Grant(name, 1, len(self.emitted[name]) + num, num_bytes))

    def plan(self) -> None:
        self.num_in_turn += len({each.options.owner for each in self.core.queues.waiting}) > 1
        for worker_id, worker in self.workers.items():
            state = self.core.workers[worker_id]
            runnable = state.runnable()
            while planned := self.core.plan(worker_id):
                self.check_plan(state, planned, runnable)
                runnable = state.runnable()
                self.results.setdefault(worker_id, []).append(worker.step(planned))

    def check_plan(self, worker: WorkerState, planned: Planned, runnable: list[Sequence]) -> None:
        """``runnable`` are the sequences that could be computed before."""
        plan = planned.plan
        tokens = {row.slot: row.num_tokens for row in plan.prefill}
        tokens |= {row.slot: 1 for row in plan.decode}
        computed = [worker.running[slot] for slot in tokens]
        self.check_stages(worker, plan)
        assert {(each.request, each.attempt) for each in plan.admit} <= {
            each.key for each in worker.running.values()
        }
        if any(each.is_isolated for each in computed):
            assert len(computed) == 1
        else:
            later = self.later(worker, [*worker.running.values(), *self.core.queues.waiting])
            self.check_later(worker, plan, tokens, later)
            leaders = [each for each in runnable if each.allocation is not None]
            are_awaited = worker.priority_share.expects_first and all(
                each.options.priority > 0 for each in leaders
            )
            if later == self.later(worker, leaders) and not are_awaited:  # or it was not known
                self.check_prefills(worker, plan, tokens, later)
        if plan.num_steps > 1:
            self.check_steps(worker, plan, computed)

    def check_stages(self, worker: WorkerState, plan: StepPlan) -> None:
        """Concurrent plans share no sequence that one of them samples."""
        beside = list(worker.in_flight)[-self.capacity.num_stages : -1]
        decoded = {row.slot for each in beside for row in each.decode}
        assert not decoded & {row.slot for row in plan.decode}
        self.num_beside += bool(decoded and plan.decode)

    def check_steps(self, worker: WorkerState, plan: StepPlan, computed: list[Sequence]) -> None:
        """A plan of several steps delays or includes only sequences that yield to its own, and its
        tokens stay within clients' credit."""
        assert not plan.prefill
        assert not plan.admit
        waiting = list(self.core.queues.waiting)
        assert not self.core.queues.isolated
        is_promised = self.core.wait_reason == WaitReason.PROMISE
        assert is_promised or all(any(map(each.yields_to, computed)) for each in waiting)
        assert not any(each.yields_to(other) for each in computed for other in computed)
        running = [each for each in worker.runnable() if not each.allocated.num_pending]
        self.num_long_beside += bool(waiting or running)
        for sequence in computed:
            assert not sequence.is_isolated
            assert len(sequence.emitted) + sequence.allocated.num_due <= sequence.max_emitted
            assert sequence.num_bytes + 4 * sequence.allocated.num_pending <= sequence.max_bytes
        self.num_long_plans += 1

    def later(self, worker: WorkerState, others: list[Sequence]) -> set[int]:
        """The slots that yield to one of ``others``."""
        return {
            slot
            for slot, sequence in worker.running.items()
            if any(map(sequence.yields_to, others))
        }

    def check_later(
        self, worker: WorkerState, plan: StepPlan, tokens: dict[int, int], later: set[int]
    ) -> None:
        """Later sequences keep their slots while others are computed, and have few tokens next to
        them, except sequences with a just arrived leader."""
        new = {row.slot for row in plan.admit}
        first = [each for slot, each in worker.running.items() if slot in tokens.keys() - later]
        old = [each for each in first if each.allocated.slot not in new]
        led = {
            slot for slot in later & tokens.keys() if any(map(worker.running[slot].yields_to, old))
        }
        num_drafts = sum(row.verify_depth for row in plan.decode if row.slot in led)
        num_tokens = num_drafts + sum(tokens[slot] for slot in led)
        assert num_tokens <= worker.priority_share.max_tokens
        self.num_joined += bool(led)
        self.num_held_back += bool(first) and any(
            not each.allocated.num_pending and each.allocated.slot in later - tokens.keys()
            for each in worker.runnable()
        )

    def check_prefills(
        self, worker: WorkerState, plan: StepPlan, tokens: dict[int, int], later: set[int]
    ) -> None:
        """For sequences that are not ``later``: every decoding one gets a token, unless stages
        divide them. No sequence starts beyond the limits, the budget is used up while a prompt is
        incomplete, and long prompts get their part of it."""
        if any(_ends_at_cut(each) for each in worker.running.values()):
            return  # before the end of the budget, and perhaps of its prompt
        limits, budget = self.limits, self.capacity.max_num_batched_tokens
        num_drafts = sum(row.verify_depth for row in plan.decode)
        running = [
            each
            for each in worker.runnable()
            if not each.allocated.num_pending and each.allocated.slot not in later
        ]
        halfway = {each.allocated.slot for each in running if each.num_to_compute > 1}
        threshold = limits.long_threshold or budget
        lacking = {
            slot: each.num_to_compute - bool(each.allocated.num_pending) + tokens.get(slot, 0)
            for slot, each in worker.running.items()
            if slot not in later and (slot in tokens or slot in halfway)
        }
        long = {slot for slot, num in lacking.items() if num > max(threshold, 1)}
        new = {each.slot for each in plan.admit} - later
        assert not new & halfway or len(halfway) <= limits.max_partial
        assert not new & long or len(long) <= limits.max_long
        if any(each.max_chunk(each.num_to_compute, 0) < each.num_to_compute for each in running):
            return  # a client has to read first
        if self.capacity.num_stages == 1:
            assert all(each.num_to_compute > 1 or each.allocated.slot in tokens for each in running)
        is_shared = self.stream_rate and (plan.decode or len(self.owners) > 1)
        if is_shared or self.capacity.num_states is not None:
            return  # a promise may keep prompts back or cut them, and chunks end at multiples
        assert not halfway or sum(tokens.values()) + num_drafts == budget
        room = budget - len(plan.decode) - num_drafts
        due = sum(min(room // limits.max_partial, lacking[slot]) for slot in long - new)
        assert not halfway or sum(tokens.get(slot, 0) for slot in long) >= min(due, room)
        self.num_overtaken += bool(long) and bool(new - long)

    def run(self) -> None:
        for _ in range(self.random.randint(1, 12)):
            self.plan()
            for worker_id in list(self.results):
                self.absorb_from(worker_id)

    def absorb(self) -> None:
        if self.results:
            self.absorb_from(self.random.choice(sorted(self.results)))

    def absorb_from(self, worker_id: str) -> None:
        result, arrays = self.results[worker_id].pop(0)
        if not self.results[worker_id]:
            del self.results[worker_id]
        layout = Layout(result.rows, arrays)
        check_result(self.core.workers[worker_id], result, arrays)
        num_steps = self.core.workers[worker_id].in_flight[0].num_steps
        num_rows = Counter(row.slot for row in result.rows if row.run.kind == RunKind.OUTPUT)
        for emission in self.core.absorb(worker_id, result, arrays):
            name = emission.sequence.request
            self.num_cut_short += emission.ends and num_rows[emission.row.slot] < num_steps > 1
            assert name in self.open
            ids = layout.part(emission.index, emission.index + 1).ids.tolist()
            self.num_bytes[name] += bytes_of(emission.row.run)
            self.num_accepted += emission.row.run.num_accepted
            self.num_rejected += emission.row.run.num_drafts - emission.row.run.num_accepted
            if emission.row.run.kind == RunKind.PROMPT:
                self.check_told(emission, ids)
            else:
                assert emission.position == len(self.emitted[name])
                self.emitted[name] += ids
            if emission.ends or emission.row.run.kind != RunKind.PROMPT:
                assert self.told.get(name, []) == self.prompts.get(name, [])[1:]
            if emission.ends:
                assert self.emitted[name] == self.expected[name]
                self.open.remove(name)

    def check_told(self, emission: Emission, ids: list[int]) -> None:
        """Each prompt token is scored once, in order, and exceeds the client's credit by at most
        one."""
        name, sequence = emission.sequence.request, emission.sequence
        if ids:
            assert emission.position == len(self.told[name])
            self.told[name] += ids
            assert self.told[name] == self.prompts[name][1 : 1 + len(self.told[name])]
            per_token = scored_token_bytes(sequence.params, 0)
            assert self.num_bytes[name] < sequence.max_bytes + per_token

    def reset_prefix_cache(self) -> None:
        self.core.reset_prefix_cache()
        assert all(not worker.index for worker in self.core.workers.values())

    def cancel(self) -> None:
        if self.open:
            name = self.random.choice(sorted(self.open))
            self.core.cancel((name, 1))
            self.open.remove(name)

    def kill_worker(self) -> None:
        if self.workers:
            worker_id = self.random.choice(sorted(self.workers))
            del self.workers[worker_id]
            self.results.pop(worker_id, None)
            self.take_out(self.core.remove_worker(worker_id, len(self.events)))

    def release_worker(self) -> None:
        """It hands over some sequences, then all, and leaves when none remains."""
        if self.workers:
            worker_id = self.random.choice(sorted(self.workers))
            self.core.release_worker(worker_id)
            while worker_id in self.results:
                self.absorb_from(worker_id)
            self.core.release_worker(worker_id)
            assert not self.core.workers[worker_id].running
            del self.workers[worker_id]
            self.take_out(self.core.remove_worker(worker_id, len(self.events)))

    def fail_unservable(self) -> None:
        """Runs some time after the loss of a worker."""
        self.give_up(since_s=len(self.events) - self.random.randint(0, 10))

    def give_up(self, since_s: float) -> None:
        refusals = self.core.fail_unservable(since_s, lambda _: Unavailable("nobody came"))
        self.num_abandoned += len(refusals)
        self.take_out(refusals)

    def check(self) -> None:
        self.check_reserved_blocks()
        self.check_ends()
        for worker_id, worker in self.core.workers.items():
            self.check_blocks(worker)
            self.check_index(worker, self.workers[worker_id])

    def check_reserved_blocks(self) -> None:
        """Every sequence is in one place."""
        core = self.core
        lines = list(core.queues)
        running = [each for worker in core.workers.values() for each in worker.running.values()]
        assert len(lines) + len(running) == len(core.sequences)
        assert {each.key for each in lines + running} == core.sequences.keys()
        assert all(not sequence.has_credit for sequence in core.queues.paused)
        assert all(sequence.allocation is None for sequence in lines)
        workers = core.workers.values()
        homeless = {each for each in lines if not any(worker.fits(each) for worker in workers)}
        assert core._unservable.keys() == homeless

    def check_ends(self) -> None:
        """Every arrived sequence is present or has ended exactly once."""
        for ended in self.core.take_ended():
            del self.expected[ended.sequence.request]
        assert {sequence.request for sequence in self.core.sequences.values()} == set(self.expected)

    def check_blocks(self, worker: WorkerState) -> None:
        """Blocks are free or have as many owners as sequences, and pins."""
        pool = worker.pool
        owners = [*(each.allocated for each in worker.running.values()), *worker.leaving]
        owned = Counter(block for each in owners for block in each.blocks)
        owned.update(self.pinned(worker))
        assert all(pool.ref_count(block) == num for block, num in owned.items())
        assert pool.num_owned == owned.total()
        assert pool.num_free + len(owned) == pool.num_blocks
        if len(owned) < owned.total():
            for one, other in combinations(worker.running.values(), 2):
                self.check_shared(worker, one, other)

    def pinned(self, worker: WorkerState) -> list[int]:
        """The blocks that have an owner which is no sequence."""
        return []

    def check_shared(self, worker: WorkerState, one: Sequence, other: Sequence) -> None:
        """Two sequences share the full blocks of their common beginning, and no others."""
        blocks, others = one.allocated.blocks, other.allocated.blocks
        shared = _places(one) & _places(other)
        assert len(shared) == len(set(blocks) & set(others)), "at different places"
        if not shared:
            return
        end = (max(number for _, number, _ in shared) + 1) * worker.capacity.block_size
        assert end <= min(one.num_computed, other.num_computed)
        assert one.known_ids()[:end].tolist() == other.known_ids()[:end].tolist()
        assert hash_root(one.options) == hash_root(other.options)

    def check_index(self, worker: WorkerState, simulated: SimulatedWorker) -> None:
        """An index names blocks by their content, and so does a keep point."""
        size = worker.capacity.block_size
        if worker.index:
            for block in range(worker.pool.num_blocks):
                name = worker.index.block_hash(block)
                assert name is None or simulated.kv[block] == self.names[name][-size:]
        for name, point in self.points_of(worker).items():
            assert len(self.names[name]) == point.num_blocks * size
            for table in point.tables:
                found = [context for block in table for context in simulated.kv[block]]
                assert found == self.names[name][-len(found) :] or not found
            if point.state is not None:
                num_ids, context = simulated.states[point.state]
                assert num_ids == point.num_blocks * size
                assert context == self.names[name][-1]
        for sequence in self.core.queues:
            self.check_hit(worker, sequence)

    def points_of(self, worker: WorkerState) -> dict[bytes, KeepPoint]:
        return worker.pool.keep_points

    def check_hit(self, worker: WorkerState, sequence: Sequence) -> None:
        """The hit is the longest prefix found by its content."""
        size, contexts = worker.capacity.block_size, _contexts(sequence.known_ids().tolist())
        ends = range(size, sequence.max_cached + 1, size)
        names = [sequence.block_hash(end // size - 1, size) for end in ends]
        assert all(
            self.names[each] == contexts[:end] for each, end in zip(names, ends, strict=True)
        )
        groups, points = worker.capacity.groups, worker.pool.keep_points.values()
        if groups[0].window is None:
            while names and any(worker.index.find(each) is None for each in names):
                names.pop()
        has_states = worker.capacity.num_states is not None
        if has_states or any(each.window is not None for each in groups):
            kept = {each.block_hash for each in points}
            while names and names[-1] not in kept:
                names.pop()
        assert worker.blocks.find_hit(sequence).num_blocks == len(names)

    def finish(self) -> None:
        """With no further events except reading, every sequence finishes and nothing is left."""
        if not self.workers:
            self.join()
        self.give_up(since_s=len(self.events))
        for _ in range(5000):
            if not self.core.sequences and not self.results:
                break
            for name in self.open:
                self.grant(name, 1)
            self.plan()
            for worker_id in list(self.results):
                self.absorb_from(worker_id)
        assert not self.open
        assert not self.core.sequences
        assert not len(self.core.queues)
        for worker in self.core.workers.values():
            assert worker.pool.num_free == worker.pool.num_blocks
            num_states = worker.pool.num_free_states + worker.pool.num_kept_states
            assert num_states == (worker.capacity.num_states or 0)
            assert not worker.running
            assert not worker.leaving
