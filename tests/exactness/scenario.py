"""Plays a cell: one prompt under the scheduler's core, with all that happens around it.

Only the target's output is compared; neighbours, rivals and an earlier request exist for their
effect on it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from llguidance import grammar_from
from msgspec.structs import replace

from shared.wire.messages import Guide, SamplingParams
from tests.exactness.cells import Cell
from tests.exactness.mesh import Engines, Mesh, Output, Prompt, Reader, Request

NUM_DRAFTS = 3
MAX_TOKENS = {"free": 28, "JSON": 32}
EVENT_AT = 2  # tokens of the target, when its worker dies or leaves, or a rival arrives
SCHEMA = """{
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 4},
        "fresh": {"type": "boolean"},
        "sizes": {"type": "array", "items": {"enum": [1, 23]}, "minItems": 1, "maxItems": 3}
    },
    "required": ["name", "fresh", "sizes"],
    "additionalProperties": false,
    "x-guidance": {"whitespace_pattern": "[ ]{0,1}"}
}"""
SPECULATION: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "MTP": {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False},
    "n-gram": {
        "method": "ngram",
        "num_speculative_tokens": NUM_DRAFTS,
        "adaptive": False,
        "prompt_lookup_min": 1,
    },
}
GRAMMAR = {"free": None, "JSON": Guide(grammar_from("json_schema", SCHEMA))}
LOGPROBS: dict[str, dict[str, Any]] = {
    "none": {},
    "scored": {"logprobs": 5, "prompt_logprobs": 5},
}


class Company(NamedTuple):
    """Neighbours before and after the target's arrival; the first ones ``lead`` if they have
    emitted tokens by then."""

    num_before: int
    num_after: int
    lead: bool


COMPANY = {
    "alone": Company(0, 0, lead=False),
    "crowd": Company(5, 0, lead=False),
    "joined": Company(2, 3, lead=True),
}


@dataclass(frozen=True)
class Prompts:
    """The target's prompt, and at least five others without a common beginning."""

    target: Prompt
    others: list[Prompt]
    temperature: float
    adapters: tuple[str, ...] = ()

    def request(self, cell: Cell) -> Request:
        params = SamplingParams(
            seed=11,
            temperature=self.temperature,
            max_tokens=MAX_TOKENS[cell.grammar],
            guide=GRAMMAR[cell.grammar],
            **LOGPROBS[cell.logprobs],
        )
        return Request("target", self.target, params, priority=1, adapter=self._adapter(0))

    def neighbour(self, number: int) -> Request:
        """Of another seed, length and form; its ``priority`` is the target's."""
        rules: list[dict[str, Any]] = [
            {},
            {"guide": GRAMMAR["JSON"]},
            {"logprobs": 2, "top_p": 0.9},
            {"temperature": 0.0, "presence_penalty": 0.5},
            {"prompt_logprobs": 1},
        ]
        plain = {"temperature": self.temperature, "max_tokens": 24 + number}
        params = SamplingParams(seed=-number, **(plain | rules[number]))
        name, adapter = f"neighbour {number}", self._adapter(number + 1)
        return Request(name, self.others[number], params, priority=1, adapter=adapter)

    def _adapter(self, number: int) -> str:
        """One of the adapters, or none, in turn."""
        return (*self.adapters, "")[number % (1 + len(self.adapters))]

    def rival(self, number: int) -> Request:
        """Takes a slot from a sequence of a later priority."""
        params = SamplingParams(seed=100 + number, max_tokens=6, ignore_eos=True)
        prompt = Prompt(self.others[-1].ids[number:])
        return Request(f"rival {number}", prompt, params, priority=0)


def play(cell: Cell, prompts: Prompts, engines: Engines) -> Output:
    """The output of the target of ``cell``."""
    company, history = COMPANY[cell.company], HISTORIES[cell.history]
    others = [prompts.neighbour(number) for number in range(company.num_before + company.num_after)]
    with Mesh(engines, 1 + len(others), caches_prefixes=history.is_repeated) as mesh:
        if history.is_repeated:
            _play_before(mesh, prompts.request(cell))
        neighbours = [mesh.send(each) for each in others[: company.num_before]]
        if company.lead:
            mesh.run_until(lambda: all(each.output.ids for each in neighbours))
        target = mesh.send(prompts.request(cell))
        mesh.run_until(lambda: len(target.output.ids) >= EVENT_AT)
        assert target.is_open, "the output is too short for an event"
        history.event(mesh, target, prompts)
        neighbours += [mesh.send(each) for each in others[company.num_before :]]
        mesh.run_until(lambda: not target.is_open)
        assert target.output.finish in ("stop", "length"), target.output.finish
        assert all(each.output.ids for each in neighbours), "a neighbour was not computed"
        return target.output


def _play_before(mesh: Mesh, request: Request) -> None:
    """Fills the prefix cache by a request with the same prompt."""
    before = mesh.send(request._replace(name="before", params=replace(request.params, seed=12)))
    mesh.run_until(lambda: not before.is_open)


def cold(mesh: Mesh, target: Reader, prompts: Prompts) -> None:
    assert target.sequence.num_cached == 0


def hit(mesh: Mesh, target: Reader, prompts: Prompts) -> None:
    """A prompt with logprobs is computed as a whole. The cached part ends within an image."""
    sequence = target.sequence
    is_scored, num_cached = sequence.params.prompt_logprobs is not None, sequence.num_cached
    assert (num_cached > 0) != is_scored
    if sequence.spans and not is_scored:
        assert any(item.start < num_cached < item.end for item, _ in sequence.spans)


def preempted(mesh: Mesh, target: Reader, prompts: Prompts) -> None:
    """Sequences of an earlier priority take all free slots and the target's."""
    for number in range(mesh.num_free_slots + 1):
        mesh.send(prompts.rival(number))
    mesh.run_until(lambda: target.sequence.num_preemptions > 0)
    mesh.run_until(lambda: target.is_running)


def killed(mesh: Mesh, target: Reader, prompts: Prompts) -> None:
    """The worker is lost with a step in flight; another one starts from nothing."""
    mesh.lose_worker()
    assert target.sequence.is_isolated
    mesh.start_worker()


def moved(mesh: Mesh, target: Reader, prompts: Prompts) -> None:
    """The worker hands its sequences over to a second one."""
    first = target.sequence.last_worker_id
    mesh.start_worker()
    mesh.release_worker(first)
    mesh.run_until(lambda: target.is_running and target.sequence.last_worker_id != first)


class History(NamedTuple):
    """An event, which checks that it took place; ``is_repeated``: the prompt was sent before."""

    event: Callable[[Mesh, Reader, Prompts], None]
    is_repeated: bool = False


HISTORIES = {
    "cold": History(cold),
    "prefix hit": History(hit, is_repeated=True),
    "preempted": History(preempted),
    "killed": History(killed),
    "moved": History(moved),
}
