"""Collects the mesh's output for one HTTP request until its handler reads it."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import msgspec
import numpy as np

from services.gateway.mesh.observer import UNOBSERVED, RequestObserver
from shared.errors import RequestError
from shared.wire.codec import Array
from shared.wire.messages import (
    NO_TOKENS,
    NOTHING_DROPPED,
    Delta,
    Dropped,
    Finished,
    Mark,
    OutputStart,
    RunKind,
    TokenRun,
)
from shared.wire.token_arrays import TokenArrays, first_tokens, join, sum_runs


@dataclass(frozen=True, slots=True)
class Drafts:
    """``arrays`` as they came: the only value of a draft is the logprob its drafter gave it.

    ``positions`` [n] int32 count the tokens of the choice before the one that a draft was for;
    ``are_accepted`` [n] bool.
    """

    arrays: TokenArrays
    positions: Array
    are_accepted: Array

    @property
    def num(self) -> int:
        return len(self.positions)


NO_DRAFTS = Drafts(TokenArrays(), np.zeros(0, np.int32), np.zeros(0, np.bool_))


def drafts_of(row: Delta, part: TokenArrays) -> Drafts:
    """Returns the drafts of a row."""
    numbers = np.arange(row.run.num_tokens, dtype=np.int32)
    return Drafts(part.copied(), row.position + numbers, numbers < row.run.num_accepted)


def joined(several: Iterable[Drafts]) -> Drafts:
    """Returns all in order; most requests have none."""
    some = [each for each in several if each.num]
    if not some:
        return NO_DRAFTS
    return Drafts(
        join([each.arrays for each in some]),
        np.concatenate([each.positions for each in some]),
        np.concatenate([each.are_accepted for each in some]),
    )


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    """New output of one choice since the last update: text and tokens (maybe no tokens), maybe its
    end.

    ``index`` counts the choices of all prompts. ``arrays`` belong to ``run``; in an update of a
    prompt, ``index`` is the prompt's first choice. ``drafts`` are the drafts verified with the
    tokens, if the client asked for their logprobs. ``marks`` are the added tokens in the text, if
    the request looks for them.
    """

    index: int
    text: str
    run: TokenRun
    arrays: TokenArrays
    finished: Finished | None
    drafts: Drafts = NO_DRAFTS
    marks: Sequence[Mark] = ()

    @property
    def num_tokens(self) -> int:
        return self.run.num_tokens

    @property
    def of_prompt(self) -> bool:
        return self.run.kind == RunKind.PROMPT

    @property
    def num_entries(self) -> int:
        """How many logprobs a reply holds of this update."""
        return len(self.arrays.values) + self.drafts.num

    def cut(self, num_tokens: int) -> "ChoiceUpdate":
        """Without the tokens after the first ``num_tokens``; accepted drafts that were among them
        count as none."""
        if num_tokens >= self.num_tokens:
            return self
        num_accepted = min(self.run.num_accepted, num_tokens)
        num_cut = self.run.num_accepted - num_accepted
        run = msgspec.structs.replace(
            self.run,
            num_tokens=num_tokens,
            num_accepted=num_accepted,
            num_drafts=self.run.num_drafts - num_cut,
        )
        drafts = NO_DRAFTS if not num_tokens else self.drafts
        return replace(
            self,
            run=run if num_tokens else NO_TOKENS,
            arrays=first_tokens(self.run, self.arrays, num_tokens),
            drafts=drafts,
        )

    @property
    def num_bytes(self) -> int:
        of_drafts = self.drafts.arrays.num_bytes if self.drafts.num else 0
        return self.arrays.num_bytes + of_drafts


def merged(updates: Sequence[ChoiceUpdate]) -> ChoiceUpdate:
    """Returns the updates of one choice as one, as if all had come at once."""
    return replace(
        updates[0],
        text="".join(each.text for each in updates),
        run=sum_runs([each.run for each in updates]),
        arrays=join([each.arrays for each in updates]),
        finished=updates[-1].finished,
        drafts=joined(each.drafts for each in updates),
        marks=[mark for each in updates for mark in each.marks],
    )


class _Pending:
    """Unread output of one choice."""

    def __init__(self) -> None:
        self.rows: list[Delta] = []
        self.parts: list[TokenArrays] = []
        self.drafts: list[Drafts] = []
        self.marks: list[Mark] = []
        self.finished: Finished | None = None

    def add(self, row: Delta, part: TokenArrays) -> None:
        if row.run.kind == RunKind.DRAFTS:
            self.drafts.append(drafts_of(row, part))
            return
        self.rows.append(row)
        if row.marks:
            self.marks += row.marks
        if row.run.num_tokens:
            self.parts.append(part.copied())

    def take(self, index: int) -> ChoiceUpdate:
        return ChoiceUpdate(
            index=index,
            text="".join(row.text for row in self.rows),
            run=sum_runs([row.run for row in self.rows]),
            arrays=join(self.parts) if self.parts else TokenArrays(),
            finished=self.finished,
            drafts=joined(self.drafts) if self.drafts else NO_DRAFTS,
            marks=self.marks,
        )


class OutputCollector:
    """A mailbox that merges: however late its reader is, a choice has one text and one end in it.

    The mesh writes, one handler reads: ``accepted`` once, then ChoiceUpdates until every choice has
    ended. It calls ``consumed`` after each, when its client or a whole reply has it, so that more
    may come, and ``cut`` for a choice whose further output it needs no more. What is pending is
    read before an error is raised. ``prompt_ids`` and ``starts`` are those of the prompts, once
    accepted, and ``dropped`` is what a chat's leaves out, ``left_out`` names what is not held of
    the request's schemas, and ``media`` are the numbers of their files that the prompts keep;
    ``num_replays`` counts how often one of them was lost and begun again, which the ``observer``
    learns.

    If it ``has_prompt_logprobs``, the logprobs of a prompt are read before the output of its
    choices, which is kept until all of them are there.
    """

    def __init__(
        self, num_prompts: int, num_choices: int, has_prompt_logprobs: bool = False
    ) -> None:
        """``num_choices`` of each prompt."""
        self.prompt_ids: list[Array | None] = [None] * num_prompts
        self.starts = [OutputStart.ANSWER] * num_prompts
        self.media: list[Sequence[int]] = [()] * num_prompts
        self.dropped = NOTHING_DROPPED
        self.left_out: Sequence[str] = ()
        self.num_replays = 0
        self.observer: RequestObserver = UNOBSERVED
        self.consumed: Callable[[ChoiceUpdate], None] = lambda update: None
        self.cut: Callable[[int], None] = lambda index: None
        self._num_open = num_prompts * num_choices
        self._num_choices = num_choices
        self._pending: dict[int, _Pending] = {}
        self._of_prompts: dict[int, _Pending] = {}  # by number of prompt
        self._num_prompt_scored = [0] * num_prompts
        self._unscored = set(range(num_prompts)) if has_prompt_logprobs else set()
        self.failed_prompt: int | None = None  # the prompt with the error that ended the request
        self._error: RequestError | None = None
        self._changed = asyncio.Event()

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(ids) for ids in self.prompt_ids if ids is not None)

    def accept(
        self,
        prompt: int,
        ids: Array,
        start: OutputStart = OutputStart.ANSWER,
        dropped: Dropped = NOTHING_DROPPED,
        left_out: Sequence[str] = (),
        media: Sequence[int] = (),
    ) -> None:
        if self.prompt_ids[prompt] is None:
            self.prompt_ids[prompt], self.starts[prompt] = ids, start
            self.media[prompt] = media
            self.dropped, self.left_out = dropped, left_out
        self._note_scored(prompt, 0)
        self._changed.set()

    def add(self, index: int, row: Delta, part: TokenArrays) -> None:
        if row.run.kind == RunKind.PROMPT:
            prompt = index // self._num_choices
            pending = self._of_prompts.setdefault(prompt, _Pending())
            self._note_scored(prompt, row.run.num_tokens)
        else:
            pending = self._pending.setdefault(index, _Pending())
        pending.add(row, part)
        self._changed.set()

    def finish(self, index: int, finished: Finished) -> None:
        """Ends a choice. With the first one of a prompt no more logprobs of the prompt come."""
        if index % self._num_choices == 0:
            self._unscored.discard(index // self._num_choices)
        self._pending.setdefault(index, _Pending()).finished = finished
        self._changed.set()

    def fail(self, error: RequestError, prompt: int) -> None:
        """``prompt`` is the number of the one that fails."""
        self._error, self.failed_prompt = error, prompt
        self._changed.set()

    async def begun(self) -> None:
        """Returns when one of the prompts will run, or has been aborted. Raises the RequestError of
        a refused prompt."""
        while all(ids is None for ids in self.prompt_ids):
            await self._change()

    async def accepted(self) -> None:
        """Returns when all prompts will run, or have been aborted. Raises the RequestError of a
        refused prompt."""
        while any(ids is None for ids in self.prompt_ids):
            await self._change()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChoiceUpdate:
        """Raises the RequestError that ended the request."""
        while (update := self._take()) is None:
            if not self._num_open:
                raise StopAsyncIteration
            await self._change()
        self._num_open -= update.finished is not None
        return update

    def _take(self) -> ChoiceUpdate | None:
        for prompt in self._of_prompts:
            return self._of_prompts.pop(prompt).take(prompt * self._num_choices)
        for index in self._pending:
            if index // self._num_choices not in self._unscored:
                return self._pending.pop(index).take(index)
        return None

    def _note_scored(self, prompt: int, num: int) -> None:
        """Counts scored tokens of a prompt: all of its tokens except the first have a logprob."""
        self._num_prompt_scored[prompt] += num
        ids = self.prompt_ids[prompt]
        if ids is not None and self._num_prompt_scored[prompt] >= len(ids) - 1:
            self._unscored.discard(prompt)

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()
