"""Engines constrain outputs by guides: with and without drafts, alone and batched, at once and
after readmission."""

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.harness import scheduled
from benchmarks.harness.engines import AnyEngine
from services.worker.engine.protocol import StepOutput
from services.worker.guides.grammars import Grammars
from shared.wire.codec import Array
from shared.wire.messages import Guide, RunKind, SamplingParams, StepPlan
from shared.wire.token_arrays import Layout
from tests.selection import only
from tests.services.worker.driver import Driver, Job, table_of
from tests.services.worker.grammars import GRAMMARS, encode, tokenizer
from tests.services.worker.guides.test_slot_guide import OPEN, held
from tests.services.worker.test_engine_contract import poisoned
from tests.services.worker.test_speculation import engine_of, prompts

pytestmark = pytest.mark.seconds

EOS_IDS = {0, 2}
NUM = 13
KINDS = [
    ("native", "none"),
    ("native", "mtp"),
    ("native", "ngram"),
    ("torch", "mtp"),
    ("device", "none"),
    ("device", "mtp"),
    ("device", "ngram"),
]


def fast(chosen: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*kind, marks=() if kind in chosen else pytest.mark.slow) for kind in KINDS]


FEW = [("native", "none"), ("native", "ngram")]
engines = pytest.mark.parametrize(
    ("kernels", "method"), fast([*FEW, ("native", "mtp"), ("device", "none")])
)
# Rules for which ``mixed`` has all engines write the same texts.
some_engines = pytest.mark.parametrize(("kernels", "method"), fast(FEW))


def engine(kernels: str, method: str) -> AnyEngine:
    return engine_of(kernels, method, 0 if method == "none" else 3)


def is_person(text: str) -> bool:
    found = json.loads(text)
    assert isinstance(found["name"], str)
    assert len(found["name"]) <= 8
    assert set(found) <= {"name", "age", "tags"}
    assert set(found.get("tags", [])) <= {"a", "bc"}
    return 0 <= found["age"] <= 150


HOLDS: dict[str, Callable[[str], Any]] = {
    "schema": is_person,
    "expression": re.compile("[a-f]{3,9}(, [0-9]{1,2}){0,2}").fullmatch,
    "choice": {"yes", "no", "nothing at all"}.__contains__,
    "Lark": lambda text: text[0] == "(" and text.count("(") == text.count(")"),
}


def some() -> list[list[int]]:
    return prompts()[1 : 1 + NUM]


def mixed() -> list[SamplingParams]:
    """The four grammars, reasoning with and without a budget, other rules, and no rule, side by
    side."""
    close = encode("\n")[0]
    guides = [Guide(grammar) for grammar in GRAMMARS.values()]
    reasons: Any = {"is_open": True, "close_ids": [close], "budget": 9, "forced_ids": [14, close]}
    rules: list[dict[str, Any]] = [
        *({"guide": guide} for guide in guides),
        {"guide": guides[0], "temperature": 0.0, "presence_penalty": 1.5, "logprobs": 2},
        {"guide": guides[1], "min_tokens": 9, "top_p": 0.8, "logit_bias": [(20, 5.0)]},
        {"guide": Guide(GRAMMARS["choice"], **reasons)},
        {"guide": Guide("", **reasons)},
        {"guide": Guide(GRAMMARS["schema"], open_ids=[OPEN, 14, 223], close_ids=[close])},
        {"guide": guides[2], "ignore_eos": True, "max_tokens": 20},
        {"guide": guides[3], "stop_token_ids": encode(")")},
        {"guide": guides[0], "bad_words": [encode('"')]},
        {},
    ]
    plain = {"temperature": 1.0, "max_tokens": 24}
    return [SamplingParams(seed=3 * seed, **(plain | each)) for seed, each in enumerate(rules)]


@cache
def expected() -> scheduled.Run:
    return scheduled.run(engine("native", "none"), some(), mixed())


@pytest.mark.parametrize("name", GRAMMARS)
def test_texts_follow_their_grammar_or_end_for_lack_of_room(name: str) -> None:
    params = [
        SamplingParams(seed=seed, guide=Guide(GRAMMARS[name]), max_tokens=60) for seed in range(24)
    ]
    done = scheduled.run(engine("native", "mtp"), prompts(), params)
    complete = [
        tokenizer().decode(ids)
        for ids, end in zip(done.texts, done.ends, strict=True)
        if end == "stop"
    ]
    assert len(complete) > NUM // 2
    assert set(done.ends) <= {"stop", "length"}
    assert all(HOLDS[name](text) for text in complete), complete


@engines
def test_texts_depend_on_neither_engine_nor_drafts(kernels: str, method: str) -> None:
    done = scheduled.run(engine(kernels, method), some(), mixed())
    assert done.texts == expected().texts
    assert done.ends == expected().ends
    if method == "mtp":
        assert done.num_accepted > 0


def test_alone_texts_are_the_same() -> None:
    alone = scheduled.run(engine("native", "mtp"), some(), mixed(), max_open=1)
    assert alone.texts == expected().texts


@pytest.mark.parametrize(
    ("kernels", "num_blocks"), [("native", 13), pytest.param("device", 40, marks=pytest.mark.slow)]
)
def test_with_little_memory_sequences_come_back_and_their_texts_are_the_same(
    kernels: str, num_blocks: int
) -> None:
    scarce = engine_of(kernels, "ngram", 3, num_gpu_blocks_override=num_blocks)
    preempted = scheduled.run(scarce, some(), mixed(), caches_prefixes=True)
    assert preempted.texts == expected().texts
    assert preempted.num_readmitted > 0


@pytest.mark.parametrize("kernels", ["native", pytest.param("device", marks=pytest.mark.slow)])
def test_a_text_goes_on_from_its_emitted_ids(kernels: str) -> None:
    texts = expected().texts
    for num_known in (1, 8):
        jobs = [
            Job(prompt, params, emitted=text[:num_known])
            for prompt, params, text in zip(some(), mixed(), texts, strict=True)
            if len(text) > num_known
        ]
        found = Driver(engine(kernels, "none"), seed=num_known).run(jobs)
        engine(kernels, "none").reset()
        assert found == [text for text in texts if len(text) > num_known]


@some_engines
def test_a_close_id_among_accepted_drafts_wakes_the_grammar(kernels: str, method: str) -> None:
    """Each output is the repeated prompt, so that drafts are right, up to a line's end."""
    close = encode("\n")[0]
    repeated = encode("import os\n" * 8)[:-2]
    guide = Guide(GRAMMARS["choice"], is_open=True, close_ids=[close])
    params = SamplingParams(seed=1, temperature=0.0, guide=guide, max_tokens=24)
    done = scheduled.run(engine(kernels, method), [repeated] * 2, params)
    assert len({tuple(text) for text in done.texts}) == 1
    reasoning, _, answer = tokenizer().decode(done.texts[0]).partition("\n")
    assert HOLDS["choice"](answer), (reasoning, answer)
    plain = scheduled.run(engine("native", "none"), [repeated] * 2, params)
    assert done.texts == plain.texts
    if method != "none":
        assert done.num_accepted > 0


@some_engines
def test_a_budget_ends_reasoning_where_it_is_spent(kernels: str, method: str) -> None:
    close = encode("</")[0]
    forced = [*encode(" so"), close]
    for budget in (0, 4):
        guide = Guide(
            GRAMMARS["choice"], is_open=True, close_ids=[close], budget=budget, forced_ids=forced
        )
        params = SamplingParams(seed=1, guide=guide, max_tokens=40)
        done = scheduled.run(engine(kernels, method), prompts()[:3], params)
        for text in done.texts:
            num_reasoned = text.index(close)
            assert num_reasoned <= budget + len(forced) - 1
            if num_reasoned == budget + len(forced) - 1:
                assert text[budget : num_reasoned + 1] == forced
            assert HOLDS["choice"](tokenizer().decode(text[num_reasoned + 1 :]))


@pytest.mark.parametrize("kernels", ["native", "device"])
def test_where_there_is_no_choice_drafts_are_right(kernels: str) -> None:
    sentence = "Nothing but this sentence may be said."
    params = SamplingParams(seed=1, guide=Guide(f'start: "{sentence}"'), max_tokens=60)
    done = scheduled.run(engine(kernels, "ngram"), some()[:4], params)
    plain = scheduled.run(engine("native", "none"), some()[:4], params)
    assert done.texts == plain.texts
    assert {tokenizer().decode(text) for text in done.texts} == {sentence}
    assert done.num_accepted > 0.6 * sum(map(len, done.texts))


def test_min_tokens_gives_way_to_a_complete_text_and_ignore_eos_repeats_its_end() -> None:
    some: dict[str, Any] = {"seed": 1, "guide": Guide(GRAMMARS["choice"]), "max_tokens": 30}
    params = [SamplingParams(**some, min_tokens=25), SamplingParams(**some, ignore_eos=True)]
    done = scheduled.run(engine("native", "mtp"), prompts()[:2], params)
    assert done.ends == ["stop", "length"]
    assert HOLDS["choice"](tokenizer().decode(done.texts[0]))
    assert len(done.texts[1]) == 30
    assert set(done.texts[1][-15:]) <= EOS_IDS
    grows = SamplingParams(seed=1, guide=Guide('start: "a"+'), min_tokens=12, max_tokens=30)
    (text,) = scheduled.run(engine("native", "mtp"), prompts()[:1], grows).texts
    assert len(text) > 12, "here more may come, so that the minimum holds"


def grammars_of(used: AnyEngine) -> Grammars:
    guides: Any = table_of(used)._guides
    return guides.grammars


class Held:
    """An engine that compiles no grammar before this number of steps has begun."""

    def __init__(self, used: AnyEngine, num_steps: int) -> None:
        grammars = grammars_of(used)
        self.waited: set[int] = set()
        self.prompts: dict[int, list[float]] = {}
        self._used, self._num_left, self._held = used, num_steps, held(grammars)
        grammars._compiled.clear()
        self._held.__enter__()

    def submit(
        self,
        plan: StepPlan,
        ids: np.ndarray,
        output: Future[StepOutput],
        pixels: Sequence[Array] = (),
    ) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self._held.__exit__(None, None, None)
        output.add_done_callback(self._note)
        self._used.submit(plan, ids, output, pixels)

    def _note(self, output: Future[StepOutput]) -> None:
        result, arrays = output.result()
        layout = Layout(result.rows, arrays)
        for index, row in enumerate(result.rows):
            if row.run.kind == RunKind.PROMPT:
                values = layout.part(index, index + 1).values.tolist()
                self.prompts.setdefault(int(row.request), []).extend(values)
            elif not (row.run.num_tokens or row.error or row.run.num_drafts):
                self.waited.add(int(row.request))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._used, name)


@cache
def prompt_logprobs() -> dict[int, list[float]]:
    plain: Any = Held(engine("native", "none"), 1)
    scheduled.run(plain, some(), SamplingParams(seed=0, max_tokens=1, prompt_logprobs=0))
    return plain.prompts


@pytest.mark.parametrize(
    ("kernels", "method"),
    only(
        [("native", "none"), ("native", "mtp"), ("device", "none")],
        ["native", "device"],
        ["none", "mtp"],
    ),
)
def test_only_the_row_of_an_uncompiled_grammar_waits_for_it(kernels: str, method: str) -> None:
    used = engine(kernels, method)
    params = [msgspec.structs.replace(each, prompt_logprobs=0) for each in mixed()]
    slow: Any = Held(used, 14)
    done = scheduled.run(slow, some(), params)
    assert done.texts == expected().texts
    assert done.ends == expected().ends
    needs = {index for index, each in enumerate(params) if each.guide and each.guide.grammar}
    assert slow.waited == needs
    for index, values in prompt_logprobs().items():
        assert slow.prompts[index] == pytest.approx(values, abs=1e-3)


@pytest.mark.parametrize("kernels", ["torch", "device"])
def test_bad_logits_fail_a_sequence_that_waits_for_its_grammar(kernels: str) -> None:
    used, prompt = engine(kernels, "none"), prompts()[0]
    job = Job(prompt, SamplingParams(seed=1, guide=Guide(GRAMMARS["choice"])))
    grammars = grammars_of(used)
    grammars._compiled.clear()
    with held(grammars), poisoned(used, int(prompt[-1])):
        Driver(used).run([job])
    used.reset()
    assert "not finite" in str(job.end.error)


OPTIONAL = "\n".join(f'r{number}: "a"? r{number + 1} "b"?' for number in range(600))
HOSTILE = [
    'start: "a" nowhere',
    GRAMMARS["schema"].replace('"object"', '"no such type"'),
    f'start: r0\n{OPTIONAL}\nr600: "a"',
]


@pytest.mark.parametrize("kernels", ["native", "device"])
def test_a_grammar_that_fails_fails_its_own_sequence(kernels: str) -> None:
    fine = mixed()[:4]
    bad = [SamplingParams(seed=1, guide=Guide(each)) for each in HOSTILE]
    bad.append(SamplingParams(seed=1, guide=Guide(GRAMMARS["choice"]), allowed_token_ids=[500]))
    jobs = [Job(prompt, each) for prompt, each in zip(prompts(), [*bad, *fine], strict=False)]
    used = engine(kernels, "none")
    Driver(used).run(jobs)
    used.reset()
    errors = [job.end.error for job in jobs]
    assert all("grammar" in each for each in errors[: len(bad) - 1]), errors
    assert "forbids every token" in errors[len(bad) - 1]
    codes = ["", "", "grammar_too_complex", "no_token_allowed"]
    assert [job.end.code for job in jobs[: len(bad)]] == codes
    assert errors[len(bad) :] == [None] * len(fine)
    alone = [Job(job.prompt, job.params) for job in jobs[len(bad) :]]
    assert Driver(used).run(alone) == [job.emitted for job in jobs[len(bad) :]]
    used.reset()


def test_guided_logprobs_match_the_raw_logits() -> None:
    params = [msgspec.structs.replace(each, logprobs=0) for each in mixed()[:4]]
    done = scheduled.run(engine("native", "none"), prompts()[:4], params)
    for prompt, text, values in zip(prompts(), done.texts, done.logprobs, strict=False):
        forced = [Guide("", is_open=True, close_ids=[1], budget=0, forced_ids=text)]
        again = SamplingParams(seed=0, guide=forced[0], logprobs=0, max_tokens=len(text))
        found = scheduled.run(engine("native", "none"), [prompt], again)
        assert found.texts[0] == text
        assert [float(each[0]) for each in found.logprobs[0]] == pytest.approx(
            [float(each[0]) for each in values], abs=1e-4
        )
