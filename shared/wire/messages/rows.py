"""Rows that messages of several links hold: sampling parameters, runs of tokens, spans."""

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from shared.wire.messages.ranges import (
    MAX_GRAMMAR_CHARS,
    MAX_LOGPROB_IDS,
    MAX_MARKER_IDS,
    MAX_PATTERN_COUNT,
    MAX_PATTERN_SIZE,
    MAX_SPANS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    Activation,
    FinishReason,
    Int32,
    Name,
    NumLogprobs,
    NumSigmas,
    Penalty,
    PooledSize,
    PoolingType,
    Row,
    Seconds,
    ServiceName,
    Share,
    SpanValue,
    StopString,
)


class Guide(Row, frozen=True):
    """What a text must be: one of ``grammar``, a string as ``llguidance.grammar_from`` returns it
    (Lark, or JSON with grammars in it); empty: any.

    The model may reason before, if there are ``close_ids``: any of them ends it, and only then does
    the grammar hold. It does reason at first if ``is_open``; otherwise one of ``open_ids`` may be
    its first token, and begins it. After ``budget`` tokens of reasoning ``forced_ids`` follow; the
    last of them ends it, or the first that is one of ``close_ids``.
    """

    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)] = ""
    is_open: bool = False
    open_ids: Annotated[list[Int32], Meta(max_length=MAX_MARKER_IDS)] = []
    close_ids: Annotated[list[Int32], Meta(max_length=MAX_MARKER_IDS)] = []
    budget: Int32 | None = None
    forced_ids: Annotated[list[Int32], Meta(max_length=MAX_STOP_CHARS)] = []


class Pooling(Row, frozen=True):
    """What is wanted of a prompt instead of a text: its last state, its first (``cls``) or the mean
    of all, as an embedding or as the logits of classes. Of an embedding the first ``num_dims``
    numbers are kept, 0: all; then ``activation`` is applied."""

    pooling_type: PoolingType = "last"
    activation: Activation = "none"
    num_dims: PooledSize = 0


class Repetition(Row, frozen=True):
    """Ends a text that ends in a pattern of so many tokens, so many times."""

    max_pattern_size: Annotated[int, Meta(ge=1, le=MAX_PATTERN_SIZE)]
    min_pattern_size: Annotated[int, Meta(ge=1, le=MAX_PATTERN_SIZE)] = 1
    min_count: Annotated[int, Meta(ge=2, le=MAX_PATTERN_COUNT)] = 2


class SamplingParams(Row, frozen=True):
    """How tokens are drawn and when the worker ends a sequence. The defaults change nothing.

    ``top_k`` 0 keeps all; ``max_tokens`` None fills the context, 0 computes the prompt alone.
    ``logprobs``: None for none, else how many of the likeliest tokens come beside the sampled
    one, ``ALL_TOKENS`` for every one; or those of ``logprob_token_ids``, and that many.
    ``prompt_logprobs``: the same of the tokens of the prompt.
    ``bad_words`` are sequences of ids whose last one may not follow the others.
    ``draft_logprobs``: each draft comes, too, with the logprob that its drafter gave it. A
    tokenizer makes the ``guide``. With ``pooling`` nothing is sampled, and ``max_tokens`` is 0.
    """

    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    temperature: Annotated[float, Meta(ge=0, le=1e3)] = 1.0
    top_k: Int32 = 0
    top_p: Share = 1.0
    max_tokens: Int32 | None = None
    ignore_eos: bool = False
    min_p: Share = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    min_tokens: Int32 = 0
    stop_token_ids: Annotated[list[Int32], Meta(max_length=MAX_STOP_IDS)] = []
    allowed_token_ids: list[Int32] = []
    logit_bias: list[tuple[Int32, Penalty]] = []
    bad_words: list[list[Int32]] = []
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    draft_logprobs: bool = False
    guide: Guide | None = None
    top_n_sigma: NumSigmas = 0.0
    pooling: Pooling | None = None
    logprob_token_ids: Annotated[list[Int32], Meta(max_length=MAX_LOGPROB_IDS)] = []
    repetition: Repetition | None = None


class Span(Row, frozen=True):
    """Something that took ``duration_s``, and began at ``start_s`` in unix time of the sender's
    host. It is a part of span number ``parent`` of its report, from 1; 0: of none there."""

    name: Name
    start_s: Seconds
    duration_s: Seconds
    parent: Int32 = 0
    attributes: dict[Name, SpanValue] = {}


class SpanReport(Row, frozen=True):
    """What ``service`` did for a prompt or a sequence in one attempt. Passed up to the gateway with
    the last message about it, or after that."""

    request: Name
    attempt: Int32
    service: ServiceName
    instance: Name
    spans: Annotated[list[Span], Meta(max_length=MAX_SPANS)]


class Finished(Row, frozen=True):
    """The one good terminal of a choice; ``num_tokens`` counts its completion tokens.

    ``stop_reason`` is the stop string or stop token id that ended it, if one did, or
    ``REPETITION_DETECTED``; ``num_cached`` as in TokenRow. The tokenizer sets both; the scheduler
    leaves the defaults.
    """

    request: Name
    attempt: Int32
    choice: Int32
    reason: FinishReason
    num_tokens: Int32
    stop_reason: Int32 | StopString | None = None
    num_cached: Int32 = 0


class RunKind(IntEnum):
    """What the tokens of a TokenRun are: those of a prompt from its second one on, drafts with the
    logprobs that their drafter gave them, or sampled ones. Rows of a sequence come in this order.
    ``POOLED`` is the last token of a prompt, whose values are what the prompt was pooled to.
    """

    PROMPT = 0
    DRAFTS = 1
    OUTPUT = 2
    POOLED = 3


class TokenRun(Row, frozen=True):
    """``num_tokens`` consecutive tokens of one sequence, and what the buffers of their message hold
    of each: an id, ``num_values`` logprobs and ``num_top_ids`` ids of the likeliest tokens.

    No values: no logprobs were asked for. Otherwise the first is the token's own, and the rest
    belong to the likeliest tokens, or those asked for, which the ids name in descending order;
    without ids they are those of the whole vocabulary, in order of ids.

    Of output, ``num_drafts`` drafts were verified and the first ``num_accepted`` tokens were
    drafts; of drafts, the first ``num_accepted`` were accepted.
    """

    num_tokens: Int32
    num_values: Int32 = 0
    num_top_ids: Int32 = 0
    kind: RunKind = RunKind.OUTPUT
    num_drafts: Int32 = 0
    num_accepted: Int32 = 0


NO_TOKENS = TokenRun(0)
