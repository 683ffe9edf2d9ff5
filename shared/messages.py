"""Every message of the mesh, grouped by the link it travels on.

On the wire a message is a msgpack array ``[tag, field, …]``. Tags are written out and never reused;
fields are only ever appended, with a default, so that a decoder of the same protocol major accepts
fewer or more trailing fields. Arrays of tokens travel beside the header as raw buffers (see
``shared/codec.py``); each docstring says which. Messages going down are verbs, messages coming up
nouns.

    Submit →           Generate →            StepPlan →
    gateway    ⇄    tokenizer     ⇄     scheduler     ⇄     worker
    ← Deltas           ← Tokens              ← StepResult
    Cancel walks down; Accepted, then Finished (in Tokens and Deltas) or Failed, comes up.
"""

from enum import IntEnum
from typing import Literal

import msgspec

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0

ServiceName = Literal["gateway", "tokenizer", "scheduler", "worker"]
FinishReason = Literal["stop", "length"]


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a message; never sent alone."""


# --- every link -----------------------------------------------------------------------------------


class ModelInfo(Row, frozen=True):
    """What the mesh tells about its model; clients see it in ``/v1/models``.

    ``fingerprint`` identifies the weights and the vocabulary: peers with different ones refuse
    each other.
    """

    names: list[str]
    fingerprint: str
    vocab_size: int
    max_model_len: int
    created: int


class Capacity(Row, frozen=True):
    """What one worker holds: cache blocks, slots and tokens a step."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


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


class Heartbeat(Row, tag=2, frozen=True):
    """Sent every second by the IO thread, and at once when ``state`` changes.

    ``load`` is the number of open requests (worker: sequences); ``num_steps`` counts finished steps
    of the step thread, so that a peer sees progress and not merely life.
    """

    state: State
    reason: str
    load: int
    num_steps: int


class Bye(Row, tag=3, frozen=True):
    """The sender leaves on purpose; nothing follows."""

    reason: str


class Refused(Row, tag=4, frozen=True):
    """The answer to a first message that is no acceptable Hello."""

    reason: str


# --- going down -----------------------------------------------------------------------------------


class SamplingParams(Row, frozen=True):
    """How tokens are drawn. ``top_k`` 0 and ``top_p`` 1 keep all; ``max_tokens`` None fills the
    context."""

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int | None = None
    ignore_eos: bool = False


class Submit(Row, tag=10, frozen=True):
    """Gateway → tokenizer: one prompt. Buffer 0: the prompt.

    ``kind`` text: UTF-8 bytes; ids: int32 token ids; chat: the JSON array of messages, UTF-8.
    """

    request: str
    attempt: int
    kind: Literal["text", "ids", "chat"]
    params: SamplingParams
    stop: list[str]


class Generate(Row, tag=11, frozen=True):
    """Tokenizer → scheduler: one choice of one prompt. Buffer 0: int32 prompt ids."""

    request: str
    attempt: int
    choice: int
    params: SamplingParams


class RequestKey(Row, frozen=True):
    request: str
    attempt: int


class Cancel(Row, tag=12, frozen=True):
    """Down both upper links: nobody waits for these any more. A key that is unknown is ignored."""

    keys: list[RequestKey]


class Admit(Row, frozen=True):
    """A sequence enters a slot. It brings all known ids: the prompt, then what was emitted before.

    ``route`` groups the rows of a StepResult by the peer they go to. ``num_ids`` counts this row's
    ids in the plan's buffer, of which the first ``prompt_len`` are the prompt; ``num_cached`` of
    them have their KV in ``blocks`` already.
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


class Extend(Row, frozen=True):
    slot: int
    blocks: list[int]


class Prefill(Row, frozen=True):
    slot: int
    num_tokens: int


class Decode(Row, frozen=True):
    slot: int


class StepPlan(Row, tag=13, frozen=True):
    """Scheduler → worker: one step, as a difference to the slots the worker holds.

    Applied in the order of the fields: a slot may be released and admitted anew in one plan.
    Buffer 0: int32 known ids of all ``admit`` rows, concatenated.
    """

    step: int
    release: list[int]
    admit: list[Admit]
    extend: list[Extend]
    prefill: list[Prefill]
    decode: list[Decode]


# --- coming up ------------------------------------------------------------------------------------


class Accepted(Row, tag=20, frozen=True):
    """The request will run. Until it arrives, a gateway has sent no byte to the client."""

    request: str
    attempt: int
    num_prompt_tokens: int


class Finished(Row, frozen=True):
    """The one good terminal of a request; ``num_tokens`` counts completion tokens."""

    request: str
    attempt: int
    reason: FinishReason
    num_prompt_tokens: int
    num_tokens: int


class TokenRow(Row, frozen=True):
    """``position`` counts the tokens of this choice before these ``num_tokens``."""

    request: str
    attempt: int
    position: int
    num_tokens: int


class Tokens(Row, tag=21, frozen=True):
    """Scheduler → tokenizer, one per peer and step. Buffer 0: int32 ids of all rows,
    concatenated."""

    rows: list[TokenRow]
    finished: list[Finished]


class Delta(Row, frozen=True):
    """Text of one choice; ``position`` as in TokenRow. Text may be empty while a character is
    incomplete."""

    request: str
    attempt: int
    choice: int
    position: int
    num_tokens: int
    text: str


class Deltas(Row, tag=22, frozen=True):
    """Tokenizer → gateway, at most one per peer and incoming Tokens."""

    rows: list[Delta]
    finished: list[Finished]


class ResultRow(Row, frozen=True):
    """What one slot emitted in a step; rows are ordered by route. ``error`` fails the request."""

    slot: int
    request: str
    attempt: int
    num_emitted: int
    finish: FinishReason | None = None
    error: str | None = None


class StepResult(Row, tag=23, frozen=True):
    """Worker → scheduler: the rows that emitted or ended. Buffer 0: int32 ids of all rows."""

    step: int
    rows: list[ResultRow]
    step_s: float = 0.0


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
    | Accepted
    | Tokens
    | Deltas
    | StepResult
    | Failed
)

# The arrays of a message, each of one dimension: the dtypes that each may have. Others have none.
ARRAYS: dict[type, tuple[set[str], ...]] = {
    Submit: ({"u1", "i4"},),
    Generate: ({"i4"},),
    StepPlan: ({"i4"},),
    Tokens: ({"i4"},),
    StepResult: ({"i4"},),
}
