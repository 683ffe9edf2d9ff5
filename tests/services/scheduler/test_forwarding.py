"""Tokens of several steps in one message: none is lost, late or reordered."""

import asyncio
from random import Random
from typing import Any

import numpy as np

from services.scheduler.results import Emission
from services.scheduler.sequence import Sequence
from services.scheduler.tokens_message import Forwarding, StepEmissions, tokens_of
from shared.wire.envelope import RequestOptions
from shared.wire.messages import EMPTY_ROW, ResultRow, RunKind, SamplingParams, TokenRun, Tokens
from shared.wire.token_arrays import Layout, TokenArrays
from tests.mesh.arena_parts import FakePeer, connect

LONG_S, SHORT_S = 60.0, 0.001


def sequence(name: str) -> Sequence:
    prompt = np.zeros(4, np.int32)
    return Sequence(
        *(name, 1, 0, 0, (0.0, 0), prompt, SamplingParams(seed=0), [], 0.0),
        options=RequestOptions(),
        option_row=EMPTY_ROW,
    )


def step_of(rows: list[tuple[Sequence, TokenRun, str | None]], random: Random) -> StepEmissions:
    """``rows``: sequence, run and finish."""
    emissions = []
    for index, (each, run, finish) in enumerate(rows):
        row = ResultRow(index, each.request, each.attempt, run, finish)  # type: ignore[arg-type]
        emissions.append(Emission(each, index, row, len(each.emitted)))
        if run.kind == RunKind.OUTPUT:
            each.emitted += [0] * run.num_tokens
    rng = np.random.default_rng(random.randrange(1000))
    runs = [run for _, run, _ in rows]
    arrays = TokenArrays(
        rng.integers(0, 99, sum(run.num_tokens for run in runs)).astype(np.int32),
        rng.random(sum(run.num_tokens * run.num_values for run in runs)).astype(np.float32),
        rng.integers(0, 99, sum(run.num_tokens * run.num_top_ids for run in runs)).astype(np.int32),
        rng.integers(1, 9, sum(run.num_tokens for run in runs if run.num_values)).astype(np.int32),
    )
    return StepEmissions(emissions, Layout([each.row for each in emissions], arrays))


def random_steps(random: Random) -> list[StepEmissions]:
    """Sequences with and without logprobs and drafts; some end."""
    widths = {sequence(str(number)): random.choice([0, 1, 3]) for number in range(3)}
    steps = []
    for _ in range(random.randint(1, 6)):
        rows: list[tuple[Sequence, TokenRun, str | None]] = []
        for each, num_values in widths.items():
            num_top_ids = max(0, num_values - 1)
            if random.random() < 0.2:
                rows.append((each, TokenRun(2, num_values=1, kind=RunKind.DRAFTS), None))
            if random.random() < 0.8:
                num = random.randint(1, 3)
                run = TokenRun(num, num_values, num_top_ids, num_drafts=2, num_accepted=num - 1)
                rows.append((each, run, None))
        if rows:
            steps.append(step_of(rows, random))
    return steps


def read(tokens: Tokens, arrays: TokenArrays) -> dict[str, list[Any]]:
    """The tokenizer's view: the runs of each sequence, with consecutive output joined."""
    layout = Layout(tokens.rows, arrays)
    found: dict[str, list[Any]] = {}
    for index, row in enumerate(tokens.rows):
        parts = [part.tolist() for part in layout.part(index, index + 1)]
        run = row.run
        entry = [row.position, run.kind, run.num_drafts, run.num_accepted, parts]
        entries = found.setdefault(row.request, [])
        before = entries[-1] if entries else None
        if before is not None and before[1] == run.kind == RunKind.OUTPUT:
            assert row.position == before[0] + len(before[4][0]), "tokens are missing"
            before[2:4] = before[2] + run.num_drafts, before[3] + run.num_accepted
            before[4] = [[*old, *new] for old, new in zip(before[4], parts, strict=True)]
        else:
            entries.append(entry)
    return found


def test_one_message_for_several_steps_equals_one_for_each() -> None:
    for seed in range(300):
        random = Random(seed)
        steps = random_steps(random)
        if not steps:
            continue
        rows, parts = [], []
        for step in steps:
            tokens, arrays = tokens_of([step])
            rows += tokens.rows
            parts.append(arrays)
        one_by_one = TokenArrays(*map(np.concatenate, zip(*parts, strict=True)))
        together, arrays = tokens_of(steps)
        assert read(together, arrays) == read(Tokens(rows, []), one_by_one)
        without_drafts = {each.request for each in rows if each.run.kind == RunKind.OUTPUT} - {
            each.request for each in rows if each.run.kind == RunKind.DRAFTS
        }
        for name in without_drafts:
            assert [row.request for row in together.rows].count(name) == 1


def test_a_plan_of_several_steps_gives_one_row_per_sequence() -> None:
    one, other = sequence("a"), sequence("b")
    run = TokenRun(1, 2, 1)
    step = step_of([(one, run, None)] * 3 + [(other, run, None), (other, run, "stop")], Random(0))
    tokens, arrays = tokens_of([step])
    assert [(row.request, row.position, row.run.num_tokens) for row in tokens.rows] == [
        ("a", 0, 3),
        ("b", 0, 2),
    ]
    assert [finished.request for finished in tokens.finished] == ["b"]
    assert [part.tolist() for part in arrays] == [part.tolist() for part in step.arrays()]


def test_ends_are_in_the_message_with_their_last_token() -> None:
    each = sequence("a")
    steps = [step_of([(each, TokenRun(1), end)], Random(0)) for end in (None, None, "stop")]
    tokens, _ = tokens_of(steps)
    (finished,) = tokens.finished
    assert (finished.request, finished.reason, finished.num_tokens) == ("a", "stop", 3)
    assert [row.run.num_tokens for row in tokens.rows] == [3]


def nums_sent(peer: FakePeer) -> list[int]:
    """Tokens of each message since the last call."""
    return [len(arrays[0]) for _, arrays in peer.take(Tokens)]


async def turn() -> None:
    """Decisions made once per turn have been made."""
    for _ in range(2):
        await asyncio.sleep(0)


async def test_short_steps_are_forwarded_together_but_for_first_tokens_and_ends() -> None:
    peer = connect("tokenizer", None)
    forwarding = Forwarding(peer, LONG_S)
    each, random = sequence("a"), Random(0)

    async def add(finish: str | None = None, who: Sequence = each) -> None:
        step = step_of([(who, TokenRun(1), finish)], random)
        forwarding.add(step.emissions, step.layout)
        await turn()

    await add()
    assert nums_sent(peer) == [1], "the first token does not wait"
    await add()
    await add()
    assert not nums_sent(peer)
    await add(who=sequence("b"))
    assert nums_sent(peer) == [3], "held tokens are sent with another's first token"
    await add()
    await add("length")
    assert nums_sent(peer) == [2]
    await add()
    forwarding.flush()
    assert nums_sent(peer) == [1]
    await add()
    forwarding.drop()
    forwarding.flush()
    assert not nums_sent(peer)


async def test_held_tokens_go_out_without_a_further_step() -> None:
    peer = connect("tokenizer", None)
    forwarding = Forwarding(peer, 20 * SHORT_S)
    each, random = sequence("a"), Random(0)
    for _ in range(3):
        step = step_of([(each, TokenRun(1), None)], random)
        forwarding.add(step.emissions, step.layout)
        await turn()
    num = sum(nums_sent(peer))
    while num < 3:
        await asyncio.sleep(SHORT_S)
        num += sum(nums_sent(peer))


async def test_steps_that_are_longer_than_the_interval_do_not_wait() -> None:
    peer = connect("tokenizer", None)
    forwarding = Forwarding(peer, SHORT_S)
    each, random = sequence("a"), Random(0)
    for _ in range(4):
        step = step_of([(each, TokenRun(1), None)], random)
        forwarding.add(step.emissions, step.layout)
        await turn()
        assert nums_sent(peer) == [1]
        await asyncio.sleep(2 * SHORT_S)
