"""Hostile grammars cost only a process that is expendable."""

import asyncio
import gc
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from services.tokenizer.guides import child as grammar_child
from services.tokenizer.guides import grammar_check
from services.tokenizer.guides.child import MAX_MASK_S, Vocabulary, _Trial
from services.tokenizer.guides.grammar_check import GrammarCheck
from shared.errors import InvalidRequest, Overloaded, Unavailable
from tests.services.tokenizer.guides.conftest import END_IDS, vocabulary_with

SMALL = 'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}}'

Children = Callable[[], set[int]]


def schema(value: object) -> str:
    return f"start: %json {json.dumps(value)}"


def chain(num: int) -> str:
    rules = "".join(f"r{index}: r{index + 1}\n" for index in range(num))
    return f'start: r0\n{rules}r{num}: "a"'


# llguidance's reactions: seconds of compiling, slow masks, errors, a stack overflow.
HOSTILE = {
    "optional properties": schema({"properties": {f"p{index}": {} for index in range(5000)}}),
    "enum": schema({"enum": [f"value {index}" for index in range(50_000)]}),
    "chain of rules": chain(100_000),
    "repetitions in repetitions": "start: /((a{1,100000}){1,100000}){1,1000}/",
    "row that grows": 'start: s\ns: s s | "a"',
    "row that grows fast": 'start: s\ns: s s | "a" | "b"',
    "states": "start: A\nA: /(.|\\n)*/ & ~/(.|\\n)*(a.{200}b|c.{200}d)(.|\\n)*/",
}
QUICK = ("enum", "repetitions in repetitions", "row that grows", "states")
WRONG = {
    "itself": schema({"$ref": "#"}),
    "no rule": "start: nothing",
    "lookahead": "start: /a(?=b)/",
    "no such format": schema({"type": "string", "format": "colour"}),
}


def read_vocabulary() -> Vocabulary:
    tokenizer = vocabulary_with().tokenizer
    return Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), END_IDS)


@pytest.fixture
async def check() -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(read_vocabulary)
    yield check
    await check.close()


def all_children() -> set[int]:
    """This process's children that have not been waited for."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in path.read_text().split()}


@pytest.fixture
def children() -> Children:
    """Children started by the test."""
    others = all_children()
    return lambda: all_children() - others


@pytest.mark.parametrize("names", [QUICK, pytest.param([*HOSTILE], marks=pytest.mark.slow)])
async def test_hostile_grammars_are_refused_and_small_ones_go_on(
    check: GrammarCheck, names: Sequence[str], subtests: pytest.Subtests
):
    for name in names:
        grammar = HOSTILE[name]
        with subtests.test(name):
            with pytest.raises(InvalidRequest) as refused:
                await check.check(grammar, "guided_grammar")
            assert refused.value.code == "grammar_too_complex"
            assert refused.value.param == "guided_grammar"
        await check.check(f"{SMALL}  // after {name}", "guided_json")


async def test_wrong_grammars_are_refused_with_the_librarys_message(
    check: GrammarCheck, subtests: pytest.Subtests
):
    for name, grammar in WRONG.items():
        with subtests.test(name):
            with pytest.raises(InvalidRequest) as refused:
                await check.check(grammar, "guided_grammar")
            assert refused.value.code == "invalid_grammar"
            assert refused.value.message.startswith("guided_grammar: the grammar cannot be used: ")


async def test_cheap_grammars_are_accepted(check: GrammarCheck, subtests: pytest.Subtests):
    for grammar in (
        schema({"properties": {f"p{index}": {} for index in range(400)}}),
        schema({"enum": [f"value {index}" for index in range(5000)]}),
        schema({"type": "array", "items": {"type": "string"}, "maxItems": 10**9}),
        'start: s\ns: s "a" | "a"',
        chain(999),
    ):
        with subtests.test(grammar[:60]):
            await check.check(grammar, "guided_json")


async def test_a_verdict_is_asked_for_once(children: Children, check: GrammarCheck):
    await asyncio.gather(*(check.check(SMALL, "guided_json") for _ in range(10)))
    (child,) = children()
    os.kill(child, 9)
    await check.check(SMALL, "guided_json")
    assert len(check._verdicts) == 1


async def test_a_child_that_died_of_nothing_is_replaced(children: Children, check: GrammarCheck):
    await check.check(SMALL, "guided_json")
    (child,) = children()
    os.kill(child, 9)
    await check.check('start: "other"', "guided_grammar")


async def test_the_queue_is_bounded_and_a_departure_makes_room(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 3)
    tasks = [
        asyncio.create_task(check.check(f'start: "a{index}"', "guided_grammar"))
        for index in range(4)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(Unavailable) as refused:
        await check.check('start: "b"', "guided_grammar")
    assert refused.value.retry_after_s
    tasks[0].cancel()  # it is being tried: its verdict is kept
    tasks[2].cancel()
    await asyncio.sleep(0)
    await check.check('start: "b"', "guided_grammar")
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(check._verdicts) == 4


async def test_an_owner_may_let_only_so_many_wait(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grammar_check, "MAX_WAITING_PER_OWNER", 2)
    mine, others, nobodys = (
        [
            asyncio.create_task(check.check(f'start: "{owner}{index}"', "guided_grammar", owner))
            for index in range(3)
        ]
        for owner in ("mine", "others", "")
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        await check.check('start: "b"', "guided_grammar", "mine")
    assert refused.value.retry_after_s
    await asyncio.gather(*mine, *others[:2], *nobodys)
    with pytest.raises(Overloaded):  # none of its own was tried meanwhile
        await others[2]
    await check.check('start: "b"', "guided_grammar", "mine")


async def test_a_timeout_by_the_clock_is_no_verdict(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
):
    await check.check(SMALL, "guided_json")
    with monkeypatch.context() as patched:
        patched.setattr(grammar_check, "MAX_TRIAL_S", 0)
        with pytest.raises(Unavailable) as refused:
            await check.check('start: "other"', "guided_grammar")
    assert refused.value.retry_after_s
    await check.check('start: "other"', "guided_grammar")


@pytest.mark.parametrize(("num_slow", "kind"), [(1, "ok"), (2, "ok"), (3, "complex")])
def test_a_grammar_that_is_slow_once_is_tried_again(
    num_slow: int, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """The first trials are as slow as on a host that loses a core."""
    starts = []

    class Matcher:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            starts.append(self)
            self._matcher = LLMatcher(*args, **kwargs)

        def __getattr__(self, name: str) -> object:
            return getattr(self._matcher, name)

        def compute_bitmask(self) -> bytes:
            begin_s = time.thread_time()
            while len(starts) <= num_slow and time.thread_time() - begin_s < 2 * MAX_MASK_S:
                pass
            return self._matcher.compute_bitmask()

    monkeypatch.setattr(grammar_child, "LLMatcher", Matcher)
    trial = _Trial.__new__(_Trial)  # without its thread, whose stack others would get too
    trial._tokenizer, trial._end_ids = vocabulary_with().matching, {*END_IDS}
    grammar = json.dumps({"grammars": [{"lark_grammar": SMALL}]})
    assert trial._tried(grammar, compiles_only=False).kind == kind
    assert len(starts) == num_slow + (kind == "ok")


@pytest.mark.parametrize("num_steps", [64, 96, 130, 250])
def test_growth_is_seen_however_far_a_machine_comes(num_steps: int):
    """Costs of an ambiguous grammar grow with the cube of the length, then stay."""
    assert grammar_child._grow([min(step, 100) ** 3.0 for step in range(num_steps)])
    assert not grammar_child._grow([1.0] * num_steps)
    assert not grammar_child._grow([100.0, *[1.0] * (num_steps - 1)])


async def test_a_child_that_is_killed_again_and_again_gives_no_verdict(
    children: Children, check: GrammarCheck
):
    """As on a machine that lacks memory."""
    await check.check(SMALL, "guided_json")
    trial = asyncio.create_task(check.check(HOSTILE["enum"], "guided_json"))
    while not trial.done():
        await asyncio.sleep(0.01)
        for child in children():
            if len(os.listdir(f"/proc/{child}/task")) > 1:  # it has started
                os.kill(child, 9)
    assert isinstance(trial.exception(), Unavailable)
    with pytest.raises(InvalidRequest, match="too complex"):
        await check.check(HOSTILE["enum"], "guided_json")


async def test_a_grammar_that_kills_a_fresh_child_is_remembered(check: GrammarCheck):
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="too complex"):
            await check.check(HOSTILE["chain of rules"], "guided_grammar")
    assert len(check._verdicts) == 1


async def test_nothing_is_left_after_close(children: Children):
    check = GrammarCheck(read_vocabulary)
    await check.check(SMALL, "guided_json")
    task = asyncio.create_task(check.check(HOSTILE["optional properties"], "guided_grammar"))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert children()
    await check.close()
    assert not children()
    gc.collect()  # anything left open would warn


def test_the_child_dies_with_its_parent():
    """By a kill, without a chance to close anything."""
    code = (
        "import asyncio, os, sys\n"
        "from tests.services.tokenizer.guides.test_grammar_check import *\n"
        "async def run():\n"
        "    check = GrammarCheck(read_vocabulary)\n"
        "    await check.check(SMALL, 'p')\n"
        "    print(*all_children(), flush=True)\n"
        "    asyncio.create_task(check.check(HOSTILE['optional properties'], 'p'))\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(run())\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        descriptor = os.pidfd_open(child)
        parent.kill()
    assert select.select([descriptor], [], [], 60)[0]
    os.close(descriptor)


@pytest.mark.parametrize("sent", [b"", b"\7", b"\0\1\0\0 the beginning of a vocabulary"])
def test_the_child_says_nothing_when_its_parent_is_gone_while_it_speaks(sent: bytes):
    done = subprocess.run(
        [sys.executable, "-m", "services.tokenizer.guides.child"],
        input=sent,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
