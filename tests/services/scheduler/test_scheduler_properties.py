"""Random arrivals, cancels and worker deaths: the contract holds and everybody finishes."""

from collections import Counter
from itertools import combinations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.scheduler.prefills import PrefillLimits
from services.scheduler.prefix_index import BlockNames
from services.scheduler.scheduler import MAX_WORKER_DEATHS, Refusal, Scheduler
from services.scheduler.sequence import Emission, Sequence, bytes_told
from services.scheduler.worker_state import WorkerState
from shared.errors import InvalidRequest, Overloaded, Unavailable
from shared.messages import (
    WINDOW_TOKENS,
    Capacity,
    Generate,
    Grant,
    SamplingParams,
    StepPlan,
)
from shared.token_arrays import Layout, bytes_of
from tests.services.scheduler.simulated_worker import SimulatedWorker, next_token


def expected_text(prompt: list[int], max_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


def names_of(ids: list[int], block_size: int, cache_salt: str) -> dict[bytes, list[int]]:
    """What SimulatedWorker has in a block, by the name that an index may have for it."""
    array, context, contexts = np.array(ids, np.int32), 0, []
    for token_id in ids:
        context = hash((context, token_id))
        contexts.append(context)
    names = BlockNames(block_size, cache_salt)
    found = {}
    for start in range(0, len(ids) - block_size + 1, block_size):
        name = names.name(start // block_size, lambda start, end: array[start:end].tobytes())
        found[name] = contexts[start : start + block_size]
    return found


class Mesh(RuleBasedStateMachine):
    """Drives the core as the service does, with simulated workers.

    Clients read when ``read`` says so; a sequence resumes what an attempt before it had emitted.
    """

    @initialize(
        num_blocks=st.integers(8, 40),
        block_size=st.sampled_from([1, 4, 16]),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 24),
        depth=st.integers(1, 2),
    )
    def start(
        self, num_blocks: int, block_size: int, max_num_seqs: int, budget: int, depth: int
    ) -> None:
        self.capacity = Capacity(num_blocks, block_size, max_num_seqs, budget, 64)
        self.core = Scheduler(max_waiting=8, priority_step_s=1, pipeline_depth=depth)
        self.workers: dict[str, SimulatedWorker] = {}
        self.results: dict[str, list[tuple]] = {}  # in the order of the plans
        self.expected: dict[str, list[int]] = {}
        self.names: dict[bytes, list[int]] = {}
        self.emitted: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}  # of those whose logprobs are asked for
        self.told: dict[str, list[int]] = {}
        self.num_bytes: Counter[str] = Counter()
        self.open: set[str] = set()
        self.ended: list[str] = []
        self.num_requests = self.num_workers = 0
        self.join(1)

    @rule(share=st.sampled_from([1, 1, 2]))
    def join(self, share: int) -> None:
        """A worker joins, now and then with less room than the others."""
        if len(self.workers) < 3:
            self.num_workers += 1
            blocks = self.capacity.num_blocks // share
            capacity = msgspec.structs.replace(self.capacity, num_blocks=blocks)
            self.workers[str(self.num_workers)] = SimulatedWorker(capacity)
            self.take_out(self.core.add_worker(str(self.num_workers), capacity))

    def take_out(self, refusals: list[Refusal]) -> None:
        """Nobody is given up but for three deaths or for lack of room everywhere."""
        for refusal in refusals:
            sequence = refusal.sequence
            if isinstance(refusal.error, InvalidRequest):
                assert not self.fits(len(sequence.prompt) + sequence.params.max_tokens)
            else:
                assert sequence.is_suspect
                assert 2 <= sequence.num_worker_deaths <= MAX_WORKER_DEATHS + 1
            self.open.remove(sequence.request)

    def fits(self, num_tokens: int) -> bool:
        """Whether some worker that is there has room for so many tokens."""
        rooms = [
            each.capacity.num_blocks * each.capacity.block_size for each in self.workers.values()
        ]
        return num_tokens <= min(64, max(rooms, default=0))

    @rule(
        prompt_len=st.integers(1, 40),
        max_tokens=st.integers(0, 30),
        route=st.integers(0, 2),
        num_resumed=st.integers(0, 3),
        priority=st.integers(-3, 3),
        window=st.integers(1, 40),
        shared=st.sampled_from([[], [*range(40)], [*range(20)], [7] * 30, [1, *[7] * 24]]),
        cache_salt=st.sampled_from(["", "", "mine"]),
        num_choices=st.sampled_from([1, 1, 3]),
        num_requests=st.integers(1, 4),
        prompt_logprobs=st.sampled_from([None, None, 0, 3]),
        share_told=st.sampled_from([0, 0, 0.4, 1]),
    )
    def arrive(
        self,
        prompt_len: int,
        max_tokens: int,
        route: int,
        num_resumed: int,
        priority: int,
        window: int,
        shared: list[int],
        cache_salt: str,
        num_choices: int,
        num_requests: int,
        prompt_logprobs: int | None,
        share_told: float,
    ) -> None:
        """Prompts begin with ``shared`` ids; those of one request are the same. Nobody has emitted
        anything before all was told of the prompt."""
        plain = SamplingParams(seed=0, max_tokens=max_tokens)
        asking = msgspec.structs.replace(plain, prompt_logprobs=prompt_logprobs)
        for _ in range(num_requests):
            self.num_requests += 1
            own = [(self.num_requests * 7 + i) % 50 for i in range(prompt_len)]
            prompt = [*shared, *own][:prompt_len]
            text = expected_text(prompt, max_tokens)
            self.names |= names_of(prompt + text, self.capacity.block_size, cache_salt)
            resumed = text[: max(0, min(num_resumed, max_tokens - 1))]
            num_told = int((prompt_len - 1) * (1 if resumed else share_told))
            for choice in range(num_choices):
                name, params = f"r{self.num_requests}/{choice}", plain if choice else asking
                generate = Generate(
                    name, 1, choice, prompt_len, params, priority, cache_salt, num_told
                )
                self.add(generate, prompt, text, resumed, route, window)

    def add(
        self,
        generate: Generate,
        prompt: list[int],
        text: list[int],
        resumed: list[int],
        route: int,
        window: int,
    ) -> None:
        name = generate.request
        fits = self.fits(len(prompt) + len(text))
        try:
            ids = np.array(prompt + resumed, np.int32)
            self.core.add(generate, ids, route, now_s=float(self.num_requests))
        except Unavailable:
            assert not self.workers
        except Overloaded:
            assert len(self.core.waiting) >= 8
        except InvalidRequest:
            assert not fits
        else:
            assert fits
            sequence = self.core.sequences[name, 1]
            assert sequence.max_emitted == len(resumed) + WINDOW_TOKENS
            sequence.max_emitted = len(resumed) + window
            sequence.max_bytes = 8 * window
            if generate.params.prompt_logprobs is not None:
                self.prompts[name] = prompt
                self.told[name] = prompt[1 : 1 + generate.num_told]
            self.expected[name] = text
            self.emitted[name] = list(resumed)
            self.open.add(name)

    @rule(pick=st.randoms(use_true_random=False), num=st.integers(1, 20))
    def read(self, pick, num: int) -> None:
        if self.open:
            self.grant(pick.choice(sorted(self.open)), num)

    def grant(self, name: str, num: int) -> None:
        num_bytes = self.num_bytes[name] + 8 * num
        self.core.grant(Grant(name, 1, len(self.emitted[name]) + num, num_bytes))

    @rule(pick=st.randoms(use_true_random=False))
    def plan(self, pick) -> None:
        for worker_id in self.workers:
            while planned := self.core.plan(worker_id):
                self.check_suspects(planned.plan)
                output = self.workers[worker_id].step(planned)
                self.results.setdefault(worker_id, []).append(output)

    def check_suspects(self, plan: StepPlan) -> None:
        """A suspect is computed alone."""
        slots = {row.slot for row in [*plan.prefill, *plan.decode]}
        rows = {(each.request, each.attempt) for each in plan.admit}
        running = [
            each
            for worker in self.core.workers.values()
            if any(sent is plan for sent in worker.in_flight)
            for each in worker.running.values()
        ]
        computed = [each for each in running if each.slot in slots]
        assert rows <= {each.key for each in running}
        assert len(computed) <= 1 or not any(each.is_suspect for each in computed)

    @rule(num=st.integers(1, 12))
    def run(self, num: int) -> None:
        for _ in range(num):
            self.plan(None)
            for worker_id in list(self.results):
                self.absorb_from(worker_id)

    @rule(pick=st.randoms(use_true_random=False))
    def absorb(self, pick) -> None:
        if self.results:
            self.absorb_from(pick.choice(sorted(self.results)))

    def absorb_from(self, worker_id: str) -> None:
        result, arrays = self.results[worker_id].pop(0)
        if not self.results[worker_id]:
            del self.results[worker_id]
        layout = Layout(result.rows, arrays)
        for emission in self.core.absorb(worker_id, result, arrays):
            name = emission.sequence.request
            assert name in self.open
            ids = layout.part(emission.index, emission.index + 1).ids.tolist()
            self.num_bytes[name] += bytes_of(emission.row)
            if emission.row.of_prompt:
                self.check_told(emission, ids)
            else:
                assert emission.position == len(self.emitted[name])
                self.emitted[name] += ids
            if emission.ends or not emission.row.of_prompt:
                assert self.told.get(name, []) == self.prompts.get(name, [])[1:]
            if emission.ends:
                assert self.emitted[name] == self.expected[name]
                self.open.remove(name)

    def check_told(self, emission: Emission, ids: list[int]) -> None:
        """Each token of the prompt once, in order, and not beyond what its client may get by more
        than one."""
        name, sequence = emission.sequence.request, emission.sequence
        if ids:
            assert emission.position == len(self.told[name])
            self.told[name] += ids
            assert self.told[name] == self.prompts[name][1 : 1 + len(self.told[name])]
            per_token = bytes_told(sequence.params, 0)
            assert self.num_bytes[name] < sequence.max_bytes + per_token

    @rule(is_time=st.sampled_from([False, False, True]))
    def reset_prefix_cache(self, is_time: bool) -> None:
        if not is_time:
            return
        self.core.reset_prefix_cache()
        assert all(not worker.index for worker in self.core.workers.values())

    @rule(pick=st.randoms(use_true_random=False))
    def cancel(self, pick) -> None:
        if self.open:
            name = pick.choice(sorted(self.open))
            self.core.cancel((name, 1))
            self.open.remove(name)

    @rule(pick=st.randoms(use_true_random=False))
    def kill_worker(self, pick) -> None:
        if self.workers:
            worker_id = pick.choice(sorted(self.workers))
            del self.workers[worker_id]
            self.results.pop(worker_id, None)
            self.take_out(self.core.remove_worker(worker_id))

    @rule(pick=st.randoms(use_true_random=False))
    def release_worker(self, pick) -> None:
        """It hands back what it has and leaves when it has nothing more."""
        if self.workers:
            worker_id = pick.choice(sorted(self.workers))
            self.core.release_worker(worker_id)
            while worker_id in self.results:
                self.absorb_from(worker_id)
            assert not self.core.workers[worker_id].running
            del self.workers[worker_id]
            self.take_out(self.core.remove_worker(worker_id))

    @invariant()
    def everybody_is_at_one_place(self) -> None:
        core = getattr(self, "core", None)
        if core is None:
            return
        lines = [*core.waiting, *core.suspects, *core.stalled]
        running = [each for worker in core.workers.values() for each in worker.running.values()]
        keys = sorted(sequence.key for sequence in lines + running)
        assert keys == sorted(core.sequences)
        assert all(not sequence.has_credit for sequence in core.stalled)

    @invariant()
    def who_came_is_here_or_was_told_to_have_ended_once(self) -> None:
        if hasattr(self, "core"):
            self.ended += [each.sequence.request for each in self.core.take_ended()]
            here = [sequence.request for sequence in self.core.sequences.values()]
            assert sorted(self.ended + here) == sorted(self.expected)

    @invariant()
    def blocks_are_free_or_have_as_many_owners_as_sequences(self) -> None:
        for worker in getattr(self, "core", Scheduler(1, 1)).workers.values():
            pool = worker.pool
            owners = [*worker.running.values(), *worker.leaving]
            owned = Counter(block for each in owners for block in each.blocks)
            assert owned == Counter({block: pool.num_owners(block) for block in owned})
            assert pool.num_owned == owned.total()
            assert pool.num_free + len(owned) == pool.num_blocks
            for one, other in combinations(worker.running.values(), 2):
                self.check_shared(worker, one, other)

    def check_shared(self, worker: WorkerState, one: Sequence, other: Sequence) -> None:
        """Two sequences share full blocks of their common beginning, and no others."""
        for block in set(one.blocks) & set(other.blocks):
            number = one.blocks.index(block)
            assert other.blocks.index(block) == number
            end = (number + 1) * worker.capacity.block_size
            assert end <= min(one.num_computed, other.num_computed)
            assert one.known_ids()[:end].tolist() == other.known_ids()[:end].tolist()
            assert one.cache_salt == other.cache_salt

    @invariant()
    def an_index_names_blocks_by_what_they_hold(self) -> None:
        for worker_id, worker in getattr(self, "core", Scheduler(1, 1)).workers.items():
            for block in range(worker.pool.num_blocks):
                name = worker.index.name(block)
                if name is not None:
                    assert self.workers[worker_id].kv[block] == self.names[name]

    def teardown(self) -> None:
        """Without further events but reading everybody finishes, and nothing is left."""
        if not hasattr(self, "core"):
            return
        if not self.workers:
            self.join(1)
        for _ in range(5000):
            for name in self.open:
                self.grant(name, 1)
            self.plan(None)
            for worker_id in list(self.results):
                self.absorb_from(worker_id)
            if not self.core.sequences and not self.results:
                break
        assert not self.open
        assert not self.core.sequences
        assert not [*self.core.waiting, *self.core.suspects, *self.core.stalled]
        for worker in self.core.workers.values():
            assert worker.pool.num_free == worker.pool.num_blocks
            assert not worker.running
            assert not worker.leaving


class LongMesh(Mesh):
    pass


TestMesh = Mesh.TestCase
TestMesh.settings = settings(max_examples=300, stateful_step_count=60)
TestLongMesh = pytest.mark.slow(LongMesh.TestCase)
TestLongMesh.settings = settings(max_examples=3000, stateful_step_count=80)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(2, 16))
@settings(max_examples=100)
def test_sequences_start_in_the_order_they_came(lengths: list[int], budget: int) -> None:
    capacity = Capacity(64, 4, 2, budget, 64)
    limits = PrefillLimits(long_threshold=64)  # none is long, or others would overtake it
    core = Scheduler(max_waiting=100, priority_step_s=1, prefill_limits=limits)
    core.add_worker("w", capacity)
    worker = SimulatedWorker(capacity)
    for index, length in enumerate(lengths):
        params = SamplingParams(seed=0, max_tokens=3)
        core.add(Generate(f"r{index}", 1, 0, length, params), np.ones(length, np.int32), 0, 0.0)
    started: list[str] = []
    while core.sequences:
        planned = core.plan("w")
        started += [admit.request for admit in planned.plan.admit]
        core.absorb("w", *worker.step(planned))
    assert started == [f"r{index}" for index in range(len(lengths))]
