"""Rows in messages of several links: sampling parameters, runs of tokens, spans."""

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
    """The constraint on an output. ``grammar`` is a string of ``llguidance.grammar_from`` (Lark, or
    JSON with grammars in it); empty: none.

    With ``close_ids`` the model may reason first: each of them ends the reasoning, and the grammar
    holds from then on. Reasoning is open from the start if ``is_open``; otherwise one of
    ``open_ids`` as the first token opens it. After ``budget`` tokens of reasoning ``forced_ids``
    follow; the last of them ends it, or the first one among ``close_ids``.
    """

    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)] = ""
    is_open: bool = False
    open_ids: Annotated[list[Int32], Meta(max_length=MAX_MARKER_IDS)] = []
    close_ids: Annotated[list[Int32], Meta(max_length=MAX_MARKER_IDS)] = []
    budget: Int32 | None = None
    forced_ids: Annotated[list[Int32], Meta(max_length=MAX_STOP_CHARS)] = []


class Pooling(Row, frozen=True):
    """The pooled output of a prompt: its last state, its first (``cls``) or the mean of all, as an
    embedding or as class logits. The first ``num_dims`` values of an embedding are kept (0: all),
    before ``activation``. The last ``num_second`` ids are of the second text of a pair."""

    pooling_type: PoolingType = "last"
    activation: Activation = "none"
    num_dims: PooledSize = 0
    num_second: Int32 = 0


class Repetition(Row, frozen=True):
    """Ends an output with a pattern repeated at its end at least ``min_count`` times, of
    ``min_pattern_size`` to ``max_pattern_size`` tokens."""

    max_pattern_size: Annotated[int, Meta(ge=1, le=MAX_PATTERN_SIZE)]
    min_pattern_size: Annotated[int, Meta(ge=1, le=MAX_PATTERN_SIZE)] = 1
    min_count: Annotated[int, Meta(ge=2, le=MAX_PATTERN_COUNT)] = 2


class SamplingParams(Row, frozen=True):
    """Parameters of sampling and of the end of a sequence. The defaults change nothing.

    ``top_k`` 0 keeps all tokens. ``max_tokens`` None fills the context, 0 computes the prompt
    alone. ``logprobs`` is the number of most likely tokens reported with the sampled one, None for
    no logprobs and ``ALL_TOKENS`` for the vocabulary; with ``logprob_token_ids`` these are reported
    instead, all of them. ``prompt_logprobs`` is the same for prompt tokens. ``bad_words`` are id
    sequences: the last id of each is excluded after the others. ``draft_logprobs``: each draft is
    reported with its drafter's logprob. A tokenizer makes the ``guide``. With ``pooling`` no token
    is sampled, and ``max_tokens`` is 0.
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
    """An activity of ``duration_s`` that began at ``start_s`` in unix time of the sender's host.
    ``parent`` is the number, from 1, of the span in the same report that contains it; 0: none."""

    name: Name
    start_s: Seconds
    duration_s: Seconds
    parent: Int32 = 0
    attributes: dict[Name, SpanValue] = {}


class SpanReport(Row, frozen=True):
    """The spans of ``service`` for a prompt or a sequence in one attempt. Passed up to the gateway
    with or after its last message."""

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
    """The kind of a TokenRun: prompt tokens from the second on, drafts with their drafter's
    logprobs, or sampled tokens. Rows of a sequence have this order. ``POOLED`` is the last token of
    a prompt, with the pooled output as its values."""

    PROMPT = 0
    DRAFTS = 1
    OUTPUT = 2
    POOLED = 3


class TokenRun(Row, frozen=True):
    """``num_tokens`` consecutive tokens of one sequence. The message's buffers hold for each token
    an id, ``num_values`` logprobs and ``num_top_ids`` ids of the most likely tokens.

    Without values no logprobs were requested. Otherwise the first is the token's own, and the
    others belong to the most likely or the requested tokens, whose ids are in descending order;
    without ids they cover the whole vocabulary, in order of ids.

    In output, ``num_drafts`` drafts were verified and the first ``num_accepted`` tokens were
    drafts. In drafts, the first ``num_accepted`` were accepted.
    """

    num_tokens: Int32
    num_values: Int32 = 0
    num_top_ids: Int32 = 0
    kind: RunKind = RunKind.OUTPUT
    num_drafts: Int32 = 0
    num_accepted: Int32 = 0


NO_TOKENS = TokenRun(0)
