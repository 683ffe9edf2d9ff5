"""The parts of a reply, whole or streamed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import orjson
from msgspec import UNSET, Raw, UnsetType

from services.gateway.chat.replies.choice_parser import ChoiceParser
from services.gateway.chat.replies.formats import Format
from services.gateway.chat.replies.logprob_json import (
    DraftLogprobs,
    EchoedPrompt,
    LogprobsById,
    LogprobWriter,
)
from services.gateway.chat.replies.openai import (
    NOTHING_SHOWN,
    Choice,
    Completion,
    CompletionTokensDetails,
    PromptTokensDetails,
    ShownPrompt,
    TokenIds,
    Usage,
)
from services.gateway.mesh.job import Job
from services.gateway.mesh.output_collector import ChoiceUpdate
from services.gateway.mesh.token_table import Spelling
from shared.settings.gateway import ReasoningField
from shared.wire.codec import Array
from shared.wire.messages import NOTHING_DROPPED, Dropped, Finished

_NO_DETAILS = CompletionTokensDetails()


@dataclass(frozen=True)
class Head:
    """The fields shared by all objects of one reply; ``created`` in Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True)
class Reply:
    """All known facts of a reply before its first token.

    ``spelling`` None: without any logprobs. ``echoes`` are the prompts' texts, or empty: not
    echoed.

    ``prompt_ids`` [prompt_len] int32 of each prompt; ``texts`` and ``offsets`` [2 prompt_len] int64
    of each if the client wants them, None: the prompt came as ids. ``dropped`` is the part of a
    chat left out of its prompt. ``reasoning_field`` names the fields of reasoning.
    """

    format: Format
    head: Head
    job: Job
    spelling: Spelling | None
    echoes: Sequence[str]
    prompt_ids: Sequence[Array]
    texts: Sequence[str] = ()
    offsets: Sequence[Array | None] = ()
    dropped: Dropped = NOTHING_DROPPED
    reasoning_field: ReasoningField = "both"

    @property
    def shows_logprobs(self) -> bool:
        return self.job.params.logprobs is not None

    @property
    def shows_tokens(self) -> bool:
        return self.shows_logprobs or self.job.returns_ids

    def logprobs(self, index: int) -> LogprobWriter | None:
        """For the tokens of choice ``index``, after the tokens of an echoed prompt."""
        if self.spelling is None or not self.shows_logprobs:
            return None
        echo = self.echoed_prompt(index)
        if self.job.logprobs_by_id:
            return LogprobsById(self.spelling.table, echo.num_top if echo is not None else None)
        return self.format.logprobs(self.spelling, echo)

    def draft_logprobs(self) -> DraftLogprobs | None:
        """For the drafts of every choice."""
        if self.spelling is None or not self.job.params.draft_logprobs:
            return None
        return DraftLogprobs(self.spelling)

    def prompt_logprobs(self) -> LogprobsById | None:
        """For the tokens of a prompt by themselves."""
        num_top = self.job.num_prompt_logprobs
        if self.spelling is None or num_top is None:
            return None
        return LogprobsById(self.spelling.table, num_top)

    def echoed_prompt(self, index: int) -> EchoedPrompt | None:
        """None without logprobs, and if the prompt was aborted before it was accepted."""
        ids, num_top = self.prompt_ids[index // self.job.num_choices], self.job.num_echoed_logprobs
        if num_top is None or not len(ids):
            return None
        return EchoedPrompt(int(ids[0]), num_top)

    def echo(self, index: int) -> str:
        return self.echoes[index // self.job.num_choices] if self.echoes else ""

    def shown_prompt(self, index: int) -> ShownPrompt:
        """The prompt of choice ``index``."""
        prompt = index // self.job.num_choices
        return ShownPrompt(
            self.prompt_ids[prompt].tolist() if self.job.returns_ids else UNSET,
            self.texts[prompt] if self.texts else UNSET,
            _written(self.offsets[prompt]) if self.offsets else UNSET,
        )

    def token_ids(self, updates: Iterable[ChoiceUpdate]) -> TokenIds:
        if not self.job.returns_ids:
            return UNSET
        sampled = (each.arrays.ids.tolist() for each in updates if not each.of_prompt)
        return list(chain.from_iterable(sampled))

    def completion(
        self,
        kind: str,
        choices: list[Choice],
        usage: Usage | UnsetType | None,
        prompt: ShownPrompt = NOTHING_SHOWN,
        prompt_logprobs: Raw | UnsetType = UNSET,
    ) -> Completion:
        """Leaves out the prompt's fields if they belong to the choices."""
        head = self.head
        on_top = (*prompt, prompt_logprobs) if self.format.prompt_on_top else ()
        return Completion(
            head.id, kind, head.created, head.model, head.system_fingerprint, choices, usage,
            *on_top,
        )  # fmt: skip


def dropped_counts(dropped: Dropped) -> tuple[int, int] | tuple[()]:
    """The dropped tokens and turns for a usage, empty if there are none."""
    return (dropped.num_tokens, dropped.num_turns) if dropped.num_turns else ()


def _written(offsets: Array | None) -> Raw | None:
    if offsets is None:
        return None
    pairs = offsets.reshape(-1, 2)
    return Raw(orjson.dumps(pairs, option=orjson.OPT_SERIALIZE_NUMPY))


class Tally:
    """The tokens of a reply, added up as its choices end, and the drafts as they come; with usage
    in every chunk, the tokens as they come too.

    A prompt's first choice determines its number of cached tokens: the other choices found in the
    cache the blocks just computed for the first one.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._num_tokens = self._num_cached = self._num_received = 0
        self._nums_reasoning: list[int | None] = []
        self._num_drafts = self._num_accepted = 0

    def add(self, update: ChoiceUpdate, parser: ChoiceParser) -> None:
        """``parser`` is the choice's."""
        self._num_drafts += update.run.num_drafts
        self._num_accepted += update.run.num_accepted
        if self._reply.job.repeats_usage:
            self._num_received += update.num_tokens
        if update.finished is not None:
            self._add_end(update.index, update.finished)
            parsing = self._reply.job.parsing
            if parsing is not None and parsing.splits_reasoning:
                self._nums_reasoning.append(parser.num_reasoning_tokens)

    def _add_end(self, index: int, finished: Finished) -> None:
        self._num_tokens += finished.num_tokens
        if index % self._reply.job.num_choices == 0:
            self._num_cached += finished.num_cached

    def usage(self) -> Usage:
        """Once all choices have ended."""
        return self._usage(self._num_tokens)

    def usage_so_far(self) -> Usage:
        return self._usage(self._num_received)

    def _usage(self, num_tokens: int) -> Usage:
        num_prompt = sum(map(len, self._reply.prompt_ids))
        return Usage(
            num_prompt,
            num_tokens,
            num_prompt + num_tokens,
            PromptTokensDetails(self._num_cached, *dropped_counts(self._reply.dropped)),
            self._details(),
        )

    def _details(self) -> CompletionTokensDetails | UnsetType:
        details = CompletionTokensDetails()
        if self._num_drafts:
            details.accepted_prediction_tokens = self._num_accepted
            details.rejected_prediction_tokens = self._num_drafts - self._num_accepted
        known = [num for num in self._nums_reasoning if num is not None]
        if known and len(known) == len(self._nums_reasoning):
            details.reasoning_tokens = sum(known)
        return UNSET if details == _NO_DETAILS else details
