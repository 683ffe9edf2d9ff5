"""Every message of the mesh, grouped by the link it travels on.

On the wire a message is a msgpack array ``[tag, field, …]``. Tags are written out and never reused;
fields are only ever appended, with a default, so that a decoder of the same protocol major accepts
fewer or more trailing fields. Arrays of tokens travel beside the header as raw buffers (see
``shared/codec.py``); each docstring says which. Messages going down are verbs, messages coming up
nouns.

    Submit →           Generate →            StepPlan →
    gateway    ⇄    tokenizer     ⇄     scheduler     ⇄     worker
    ← Deltas           ← Tokens              ← StepResult
    Cancel and Credit walk down. Accepted, then Finished (in Tokens and Deltas) or Failed, comes up.

A request of a client is named ``id~nonce``, each of its prompts ``id~nonce/prompt``, and each
choice of a prompt, which is one sequence, ``id~nonce/prompt/choice``.
"""

from enum import IntEnum
from typing import Literal

import msgspec

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0

ServiceName = Literal["gateway", "tokenizer", "scheduler", "worker"]
FinishReason = Literal["stop", "length", "abort"]
PromptKind = Literal["text", "ids", "chat"]

# What a sequence may emit beyond what its client has taken; see Credit.
WINDOW_TOKENS = 256
WINDOW_BYTES = 4 << 20
MAX_STOP_IDS = 128  # of a request
ALL_TOKENS = -1  # as SamplingParams.logprobs: the whole vocabulary


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a message; never sent alone."""


# --- every link -----------------------------------------------------------------------------------


class SamplingDefaults(Row, frozen=True):
    """What holds where a client says nothing: generation_config.json's values, else OpenAI's."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ModelInfo(Row, frozen=True):
    """What the mesh tells about its model; clients see it in ``/v1/models``.

    ``fingerprint`` identifies the weights and the vocabulary: peers with different ones refuse
    each other. ``defaults`` are a tokenizer's; a worker needs none.
    """

    names: list[str]
    fingerprint: str
    vocab_size: int
    max_model_len: int
    created: int
    defaults: SamplingDefaults = SamplingDefaults()


class Capacity(Row, frozen=True):
    """What one worker holds: cache blocks, slots and tokens a step; entries of its logits.

    It drafts up to ``num_speculative_tokens`` of a sequence in a step, always as many unless
    ``adapts_depth``: then as many as pay.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int = 0
    num_speculative_tokens: int = 0
    adapts_depth: bool = False


class Hello(Row, tag=1, frozen=True):
    """First message of either side. A tokenizer and a worker tell their model, a worker its
    capacity."""

    major: int
    minor: int
    service: ServiceName
    instance: str
    model: ModelInfo | None = None
    capacity: Capacity | None = None


class State(IntEnum):
    """What a peer may be asked. The order is of no meaning."""

    NOT_READY = 0
    READY = 1
    DRAINING = 2


class Overview(Row, frozen=True):
    """The mesh at a glance, as its scheduler ``scheduler`` (an instance) sees it."""

    scheduler: str
    num_workers: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int


class Heartbeat(Row, tag=2, frozen=True):
    """Sent every second by the IO thread, and at once when ``state`` changes.

    ``load`` is the number of open requests (worker: sequences); ``num_steps`` counts finished steps
    of the step thread, so that a peer sees progress and not merely life.

    ``sent_s`` is the sender's monotonic clock; ``echo_s`` the ``sent_s`` of the last heartbeat that
    came from this peer, which lay with the sender for ``held_s``; 0: none came. ``overview`` is a
    scheduler's; a tokenizer passes on that of its scheduler, which may be a second old.
    """

    state: State
    reason: str
    load: int
    num_steps: int
    sent_s: float = 0.0
    echo_s: float = 0.0
    held_s: float = 0.0
    overview: Overview | None = None


class Bye(Row, tag=3, frozen=True):
    """The sender leaves on purpose; nothing follows."""

    reason: str


class Refused(Row, tag=4, frozen=True):
    """The answer to a first message that is no acceptable Hello."""

    reason: str


# --- going down -----------------------------------------------------------------------------------


class SamplingParams(Row, frozen=True):
    """How tokens are drawn and when the worker ends a sequence. The defaults change nothing.

    ``top_k`` 0 keeps all; ``max_tokens`` None fills the context, 0 computes the prompt alone.
    ``logprobs``: None for none, else how many of the likeliest tokens are told beside the drawn
    one, ``ALL_TOKENS`` for every one. ``prompt_logprobs``: the same of the tokens of the prompt.
    ``bad_words`` are sequences of ids whose last one may not follow the others.
    ``draft_logprobs``: each draft is told, with the logprob that its drafter gave it.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    allowed_token_ids: list[int] = []
    logit_bias: list[tuple[int, float]] = []
    bad_words: list[list[int]] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    draft_logprobs: bool = False


class TextOptions(Row, frozen=True):
    """What the tokenizer does with the text. ``bad_words`` end up in SamplingParams, as ids."""

    stop: list[str] = []
    bad_words: list[str] = []
    includes_stop: bool = False
    skips_special_tokens: bool = True
    adds_special_tokens: bool = True


class ChoiceStart(Row, frozen=True):
    """A choice to make, and how much of it the gateway has already: a replay goes on from there.

    ``num_ids`` counts the choice's ids in the Submit's second buffer, ``num_told`` the tokens of
    the prompt whose logprobs are there.
    """

    choice: int
    num_ids: int = 0
    num_chars: int = 0
    num_told: int = 0


class Submit(Row, tag=10, frozen=True):
    """Gateway → tokenizer: one prompt. Buffers: the prompt; int32 ids that its choices have.

    ``kind`` text: UTF-8 bytes; ids: int32 token ids; chat: the JSON array of messages, UTF-8.
    """

    request: str
    attempt: int
    kind: PromptKind
    params: SamplingParams
    text: TextOptions
    choices: list[ChoiceStart]
    priority: int = 0
    cache_salt: str = ""


class Generate(Row, tag=11, frozen=True):
    """Tokenizer → scheduler: one choice of one prompt, which is a sequence.

    Buffer: int32 ids, ``prompt_len`` of the prompt, then those that were emitted before.
    ``priority``: of two that wait the lower number comes first. Only sequences with the same
    ``cache_salt`` share what is cached. ``num_told``: as in ChoiceStart.
    """

    request: str
    attempt: int
    choice: int
    prompt_len: int
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    num_told: int = 0


class RequestKey(Row, frozen=True):
    request: str
    attempt: int


class Cancel(Row, tag=12, frozen=True):
    """Down both upper links: nobody waits for these any more. A key that is unknown is ignored."""

    keys: list[RequestKey]


class Grant(Row, frozen=True):
    """One sequence may emit up to ``num_tokens`` tokens and ``num_bytes`` bytes in all."""

    request: str
    attempt: int
    num_tokens: int
    num_bytes: int


class Credit(Row, tag=14, frozen=True):
    """Down both upper links, as clients take what came: a sequence without credit is not planned.

    Bytes are those of the arrays in Tokens and Deltas. An attempt begins with ``WINDOW_TOKENS`` and
    ``WINDOW_BYTES`` beyond what it resumes.
    """

    grants: list[Grant]


class Convert(Row, tag=15, frozen=True):
    """Gateway → tokenizer, beside the data path: what are the ids of this text, or the text of
    these ids? Buffer: as in Submit. Answered by Converted, or Failed with attempt 0."""

    request: str
    kind: PromptKind
    adds_special_tokens: bool


class Abort(Row, tag=16, frozen=True):
    """Gateway → every tokenizer: ends the requests that clients know by these ids."""

    ids: list[str]


class Admit(Row, frozen=True):
    """A sequence enters a slot. It brings all known ids: the prompt, then what was emitted before.

    ``route`` groups the rows of a StepResult by the peer they go to. ``num_ids`` counts this row's
    ids in the plan's buffer, of which the first ``prompt_len`` are the prompt; ``num_cached`` of
    them have their KV in ``blocks`` already. ``num_told``: as in ChoiceStart.
    """

    slot: int
    request: str
    attempt: int
    route: int
    choice: int
    prompt_len: int
    num_ids: int
    num_cached: int
    params: SamplingParams
    blocks: list[int]
    num_told: int = 0


class Extend(Row, frozen=True):
    slot: int
    blocks: list[int]


class Prefill(Row, frozen=True):
    slot: int
    num_tokens: int


class Decode(Row, frozen=True):
    """One token, and up to ``verify_depth`` of the slot's drafts are verified beside it."""

    slot: int
    verify_depth: int = 0


class StepPlan(Row, tag=13, frozen=True):
    """Scheduler → worker: one step, as a difference to the slots the worker holds.

    Applied in the order of the fields: a slot may be released and admitted anew in one plan.
    ``draft_depth``: how many drafts to make of each sequence that samples, for the next plan.
    Buffer 0: int32 known ids of all ``admit`` rows, concatenated.
    """

    step: int
    release: list[int]
    admit: list[Admit]
    extend: list[Extend]
    prefill: list[Prefill]
    decode: list[Decode]
    draft_depth: int = 0


# --- coming up ------------------------------------------------------------------------------------


class Accepted(Row, tag=20, frozen=True):
    """All choices will run. Until it arrives, a gateway has sent no byte to the client.

    Buffer: int32 ids of the prompt; a scheduler, whose peer knows them, sends none.
    """

    request: str
    attempt: int


class Finished(Row, frozen=True):
    """The one good terminal of a choice; ``num_tokens`` counts its completion tokens.

    ``stop_reason`` is the stop string or stop token id that ended it, if one did; ``num_cached`` as
    in TokenRow. Both are a tokenizer's to tell.
    """

    request: str
    attempt: int
    choice: int
    reason: FinishReason
    num_tokens: int
    stop_reason: int | str | None = None
    num_cached: int = 0


class TokenRow(Row, frozen=True):
    """``num_tokens`` tokens of one sequence, after ``position`` others of it.

    A token has ``num_values`` logprobs and ``num_top_ids`` ids in the buffers of its message. No
    values: none were asked for. Otherwise the first is the token's own, and the rest belong to the
    likeliest tokens, which the ids name in descending order; without ids they are those of the
    whole vocabulary, in order of ids. ``num_cached`` ids of the prompt came from the cache.

    ``of_prompt``: the tokens are those of the prompt from its second one on, which nobody drew.
    ``of_drafts``: they are drafts for what comes from ``position`` on, with the logprobs that their
    drafter gave them; the first ``num_accepted`` of them were right. Elsewhere ``num_drafts``
    counts the drafts that were verified beside the tokens, and ``num_accepted`` those that are
    among them.
    """

    request: str
    attempt: int
    position: int
    num_tokens: int
    num_values: int = 0
    num_top_ids: int = 0
    num_cached: int = 0
    of_prompt: bool = False
    of_drafts: bool = False
    num_drafts: int = 0
    num_accepted: int = 0


class Tokens(Row, tag=21, frozen=True):
    """Scheduler → tokenizer, one per peer and step; requests are named as sequences.

    Buffers, of all rows, concatenated: int32 ids; float32 logprobs; int32 ids of the likeliest;
    int32 ranks of the tokens (1: the likeliest), for the rows with values.
    """

    rows: list[TokenRow]
    finished: list[Finished]


class Delta(Row, frozen=True):
    """A TokenRow of one choice, and the text that became certain with its tokens.

    ``text`` may be empty while a character is incomplete, or come without a token.
    """

    request: str
    attempt: int
    choice: int
    position: int
    num_tokens: int
    text: str
    num_values: int = 0
    num_top_ids: int = 0
    of_prompt: bool = False
    of_drafts: bool = False
    num_drafts: int = 0
    num_accepted: int = 0


class Deltas(Row, tag=22, frozen=True):
    """Tokenizer → gateway, at most one per peer and incoming Tokens. Buffers: as Tokens."""

    rows: list[Delta]
    finished: list[Finished]


class ResultRow(Row, frozen=True):
    """What one slot emitted in a step; rows are ordered by route. ``error`` fails the request.

    ``num_values``, ``num_top_ids`` and what follows ``error``: as in TokenRow. A slot may have
    several rows: of its prompt, of its drafts, then of its tokens.
    """

    slot: int
    request: str
    attempt: int
    num_tokens: int
    finish: FinishReason | None = None
    error: str | None = None
    num_values: int = 0
    num_top_ids: int = 0
    of_prompt: bool = False
    of_drafts: bool = False
    num_drafts: int = 0
    num_accepted: int = 0


class StepResult(Row, tag=23, frozen=True):
    """Worker → scheduler: the rows that emitted or ended. Buffers: as Tokens.

    The step took ``step_s``, after ``idle_s`` of waiting for its plan.
    """

    step: int
    rows: list[ResultRow]
    step_s: float = 0.0
    idle_s: float = 0.0


class Release(Row, tag=25, frozen=True):
    """Worker → scheduler: take back all sequences, I leave before they would end."""


class Lost(Row, tag=26, frozen=True):
    """Tokenizer → gateway: the scheduler that had these is gone; submit them anew. No terminal."""

    keys: list[RequestKey]


class Converted(Row, tag=27, frozen=True):
    """Tokenizer → gateway: the answer to Convert. Buffer: UTF-8 bytes of a text, or int32 ids."""

    request: str


class Vocabulary(Row, tag=28, frozen=True):
    """Tokenizer → gateway, once: how tokens are written.

    Buffers: the bytes of all tokens in order of ids, concatenated; int32 number of bytes of each.
    """


class Failed(Row, tag=24, frozen=True):
    """The one bad terminal of a request, up every link; the fields are those of
    ``errors.RequestError``."""

    request: str
    attempt: int
    status: int
    error_type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


Message = (
    Hello
    | Heartbeat
    | Bye
    | Refused
    | Submit
    | Generate
    | Cancel
    | StepPlan
    | Credit
    | Convert
    | Abort
    | Accepted
    | Tokens
    | Deltas
    | StepResult
    | Failed
    | Release
    | Lost
    | Converted
    | Vocabulary
)

TOKEN_ARRAYS = ({"i4"}, {"f4"}, {"i4"}, {"i4"})

# The arrays of a message, each of one dimension: the dtypes that each may have. Others have none.
ARRAYS: dict[type, tuple[set[str], ...]] = {
    Submit: ({"u1", "i4"}, {"i4"}),
    Generate: ({"i4"},),
    StepPlan: ({"i4"},),
    Convert: ({"u1", "i4"},),
    Accepted: ({"i4"},),
    Tokens: TOKEN_ARRAYS,
    Deltas: TOKEN_ARRAYS,
    StepResult: TOKEN_ARRAYS,
    Converted: ({"u1", "i4"},),
    Vocabulary: ({"u1"}, {"i4"}),
}
