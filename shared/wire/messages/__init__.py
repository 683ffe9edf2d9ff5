"""Every message of the mesh, grouped by the link it travels on.

On the wire a message is a msgpack array ``[tag, field, …]``. Tags are written out and never reused;
fields are only ever appended, with a default, so that a decoder of the same protocol major accepts
fewer or more trailing fields. Arrays of tokens travel beside the header as raw buffers
(``codec.py``); each docstring names them. Messages going down are verbs, messages coming up nouns.

    Submit →           Generate →            StepPlan →
    gateway    ⇄    tokenizer     ⇄     scheduler     ⇄     worker
    ← Deltas           ← Tokens              ← StepResult
    Cancel and Credit walk down. Accepted, then Finished (in Tokens and Deltas) or Failed, comes up.

Every number and every name has its range here, and ``decode`` refuses what is outside: a receiver
compares ids and counts only with what it holds itself.

A request of a client is named ``id~nonce``, each of its prompts ``id~nonce/prompt``, and each
choice of a prompt, which is one sequence, ``id~nonce/prompt/choice``.
"""

from enum import IntEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PROTOCOL_MAJOR = 3
PROTOCOL_MINOR = 5
POOLING_MINOR = 1  # that knows of pooling
CONVERTED_MINOR = 2  # that makes of a prompt what Convert asks for, not its ids alone
REPORT_MINOR = 2  # that knows of Inquire and ServiceReport
CELLS_MINOR = 3  # that knows of several schedulers, each with workers of its own

ServiceName = Literal["gateway", "tokenizer", "scheduler", "worker"]
FinishReason = Literal["stop", "length", "abort", "repetition"]
PromptKind = Literal["text", "ids", "chat", "pair"]
ConvertedTo = Literal["ids", "text", "offsets", "tokenizer"]
Runner = Literal["", "generate", "pooling"]
PoolingType = Literal["last", "mean", "cls"]
Activation = Literal["none", "normalize", "sigmoid", "softmax"]

# What a sequence may emit beyond what its client has taken; see Credit.
WINDOW_TOKENS = 256
WINDOW_BYTES = 4 << 20
MAX_STOP_IDS = 128  # of a request
MAX_LOGPROB_IDS = 128
MAX_PATTERN_SIZE = 512  # tokens that are looked for as a repetition
MAX_PATTERN_COUNT = 512
# Bounds of Capacity: a scheduler keeps something for each of these.
MAX_BLOCKS = 1 << 24
MAX_BLOCK_SIZE = 256
MAX_SEQS = 1 << 16
MAX_BATCHED_TOKENS = 1 << 20
MAX_MODEL_LEN = 1 << 24
MAX_VOCAB_SIZE = 1 << 24
MAX_SPECULATIVE_TOKENS = 16
MAX_STEPS = 1 << 10  # of a plan
MAX_STALL_S = 86_400.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_BAD_WORDS = 128
MAX_CHOICES = 4096
MAX_PRIORITY = 1000  # of a request, early and late
REPETITION_DETECTED = "repetition_detected"  # vLLM's word
ALL_TOKENS = -1  # as SamplingParams.logprobs: the whole vocabulary
MIN_LOGPROB = -9999.0  # of a token that cannot be sampled: JSON has no infinity; vLLM's is the same
MAX_REASON_CHARS = 4000
MAX_NAME_CHARS = 256
MAX_JSON_CHARS = 256 << 10  # of tools, documents, template arguments and a template, each
MAX_FORMAT_CHARS = 256 << 10  # of a schema, an expression or a grammar of a client
MAX_GRAMMAR_CHARS = 512 << 10  # of what becomes of it
MAX_TOOLS = 512
MAX_LEFT_OUT = 8  # places that are named to a client
TOOL_NAME = r"[a-zA-Z0-9_.-]{1,128}"
MAX_MARKER_IDS = 64
MAX_POOLED_SIZE = 1 << 16  # numbers that a model gives of a text
MAX_LABELS = 4096
MAX_STAGES = 64  # of a worker
MAX_STATS = 64  # of a service in a ServiceReport
MAX_SETTINGS = 256  # of a rank
MAX_REPORTED_PEERS = 65_536
MAX_SPANS = 256  # of a report
MAX_TRACED = 16  # prompts of a request, and choices of a prompt, that are traced
MAX_CELLS = 256  # schedulers that a tokenizer speaks of

Int32 = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # a count, an index or an id
Int64 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
NumSteps = Annotated[int, Meta(ge=1, le=MAX_STEPS)]
NumLogprobs = Annotated[int, Meta(ge=ALL_TOKENS, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-1e3, le=1e3)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
NumSigmas = Annotated[float, Meta(ge=0, le=1e3)]  # 0: no filter
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
Json = Annotated[str, Meta(max_length=MAX_JSON_CHARS)]
PooledSize = Annotated[int, Meta(ge=0, le=MAX_POOLED_SIZE)]
NumStages = Annotated[int, Meta(ge=1, le=MAX_STAGES)]
SpanValue = bool | int | float | Name


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a message; never sent alone."""


# --- every link -----------------------------------------------------------------------------------


class SamplingDefaults(Row, frozen=True):
    """Used where a request sets no value: generation_config.json's values, else OpenAI's."""

    temperature: Annotated[float, Meta(ge=0, le=1e3)] = 1.0
    top_k: Int32 = 0
    top_p: Share = 1.0
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    top_n_sigma: NumSigmas = 0.0


class PoolingInfo(Row, frozen=True):
    """What a model that pools gives of a text: an embedding of ``size`` numbers, or the logits of
    as many classes, which have the names ``labels``.

    ``activation`` is applied to it unless a request wants another. An embedding may be cut to one
    of ``dimensions``, or to any number of its first numbers if it ``is_matryoshka``.
    """

    task: Literal["embed", "classify"]
    pooling_type: PoolingType
    activation: Activation
    size: PooledSize
    labels: Annotated[list[Reason], Meta(max_length=MAX_LABELS)] = []
    is_matryoshka: bool = False
    dimensions: Annotated[list[PooledSize], Meta(max_length=MAX_LABELS)] = []


class ModelInfo(Row, frozen=True):
    """Describes the model that the mesh serves; clients see it in ``/v1/models``.

    ``fingerprint`` identifies the weights and the vocabulary: peers with different ones refuse
    each other. ``names`` and ``defaults`` are a tokenizer's, what is below them a worker's: with
    others it would write other texts. ``tool_parser`` and ``reasoning_parser`` name the formats of
    ``shared/dialects`` in which it calls tools and reasons; empty: it does not. It writes texts if
    its ``runner`` is ``generate``, and has ``pooling`` otherwise.
    """

    names: list[Reason]
    fingerprint: Name
    vocab_size: Int32
    max_model_len: Int32
    created: Int64
    defaults: SamplingDefaults = SamplingDefaults()
    dtype: Name = ""
    load_format: Name = ""
    logprobs_mode: Name = ""
    tool_parser: Name = ""
    reasoning_parser: Name = ""
    quantization: Name = ""  # "none": the weights are as in the checkpoint
    kv_cache_dtype: Name = ""  # "auto": the KV cache has numbers of ``dtype``
    activation_dtype: Name = ""  # "auto": so has what quantised weights are multiplied with
    runner: Runner = ""
    pooling: PoolingInfo | None = None
    lm_head_quantization: Name = ""  # "none": the output head's weights are as in the checkpoint
    embedding_quantization: Name = ""  # "none": so are the embeddings


class Capacity(Row, frozen=True):
    """What one worker holds: cache blocks, slots and tokens a step; entries of its logits.

    It drafts up to ``num_speculative_tokens`` of a sequence in a step, always as many unless
    ``adapts_depth``: then as many as pay. A step that has not ended after ``stall_s`` hangs. A
    model that pools gives ``pooled_size`` numbers of a prompt; 0: it writes texts. A plan may ask
    for ``max_num_steps``. It computes as many plans at a time as it has ``num_stages``, as long as
    none has a sequence of another.
    """

    num_blocks: Int32
    block_size: Int32
    max_num_seqs: Int32
    max_num_batched_tokens: Int32
    max_model_len: Int32
    vocab_size: Int32 = 0
    num_speculative_tokens: Int32 = 0
    adapts_depth: bool = False
    stall_s: Seconds = 60.0
    pooled_size: PooledSize = 0
    max_num_steps: NumSteps = 1
    num_stages: NumStages = 1


INSTANCE = r"[A-Za-z0-9._-]{1,32}"  # what a process may be called
Instance = Annotated[str, Meta(pattern=f"^{INSTANCE}$")]
Stats = Annotated[dict[Name, int | float | Name], Meta(max_length=MAX_STATS)]


class RankInfo(Row, frozen=True):
    """One of the processes that are a worker together: ``rank`` counts from 0. ``settings`` are
    those that have to be the same for all, and what else has to be, by name."""

    rank: Int32
    settings: Annotated[dict[Name, Name], Meta(max_length=MAX_SETTINGS)] = {}


class Hello(Row, tag=1, frozen=True):
    """First message of either side. A tokenizer and a worker send their model, a worker its
    capacity too, and to the first rank another one sends what it is.

    ``still_s`` ago the sender stood still for so long that peers may have given it up; None: it
    never has, or its minor is below 5.
    """

    major: Int32
    minor: Int32
    service: ServiceName
    instance: Name
    model: ModelInfo | None = None
    capacity: Capacity | None = None
    rank: RankInfo | None = None
    still_s: Seconds | None = None


class State(IntEnum):
    """What a peer may be asked. The order is of no meaning."""

    NOT_READY = 0
    READY = 1
    DRAINING = 2


class Overview(Row, frozen=True):
    """Figures of a cell: the scheduler ``scheduler`` (an instance) and its workers.

    It has ``num_slots`` for sequences, and ``is_ready`` where a worker takes some. A scheduler that
    ``is_leaving`` hands over what it has. ``spare`` is the worker to go where a cell lacks some;
    empty: none, or one is going.
    """

    scheduler: Name
    num_workers: Int64
    num_running: Int64
    num_waiting: Int64
    num_blocks: Int64
    num_free_blocks: Int64
    num_slots: Int64 = 0
    is_leaving: bool = False
    spare: Name = ""
    is_ready: bool = True


class Heartbeat(Row, tag=2, frozen=True):
    """Sent twice a second by the IO thread, and at once when ``state`` changes.

    ``load`` is the number of open requests (worker: sequences); ``num_steps`` counts finished steps
    of the step thread, so that a peer sees progress and not merely life.

    ``sent_s`` is the sender's monotonic clock. ``echo_s`` repeats the receiver's last ``sent_s``,
    and ``held_s`` is how long ago the sender received it; both are 0 before its first heartbeat.
    ``overview`` is a scheduler's; a tokenizer passes on those of its schedulers, up to a second
    old: ``more_overviews`` has all but the first.
    """

    state: State
    reason: Reason
    load: Int64
    num_steps: Int64
    sent_s: Seconds = 0.0
    echo_s: Seconds = 0.0
    held_s: Seconds = 0.0
    overview: Overview | None = None
    more_overviews: Annotated[list[Overview], Meta(max_length=MAX_CELLS)] = []

    @property
    def overviews(self) -> list[Overview]:
        return [] if self.overview is None else [self.overview, *self.more_overviews]


class Bye(Row, tag=3, frozen=True):
    """The sender leaves on purpose; nothing follows. A service that breaks sends no Bye."""

    reason: Reason


class Refused(Row, tag=4, frozen=True):
    """The answer to a first message that is no acceptable Hello, by the process ``instance``."""

    reason: Reason
    instance: Name = ""


# --- going down -----------------------------------------------------------------------------------


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


class TextOptions(Row, frozen=True):
    """What the tokenizer does with the text. ``bad_words`` end up in SamplingParams, as ids.
    ``has_marks``: Deltas say where the added tokens of the vocabulary are. Of a prompt of more
    than ``max_prompt_tokens`` the last are kept, or the first if it ``keeps_prompt_start``.
    ``fits_max_tokens``: SamplingParams' ``max_tokens`` counts as far as the context goes."""

    stop: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] = []
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] = []
    includes_stop: bool = False
    skips_special_tokens: bool = True
    adds_special_tokens: bool = True
    has_marks: bool = False
    max_prompt_tokens: Int32 | None = None
    keeps_prompt_start: bool = False
    fits_max_tokens: bool = False


class ChatOptions(Row, frozen=True):
    """What a chat template gets beside the messages.

    ``tools`` and ``documents`` are JSON arrays, ``template_kwargs`` is a JSON object; empty: none.
    ``template`` is used instead of the model's. ``continues_final_message``: the prompt ends in the
    text of the last message, which the model continues. Where the prompt has more tokens than the
    ``history_limit`` its oldest turns are dropped; 0: none are.
    """

    tools: Json = ""
    documents: Json = ""
    template_kwargs: Json = ""
    template: Json = ""
    adds_generation_prompt: bool = True
    continues_final_message: bool = False
    history_limit: Int32 = 0


FormatKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]


class OutputFormat(Row, frozen=True):
    """What a client wants a text to be. ``value`` is a JSON schema, an expression, a JSON array of
    strings, a grammar (Lark or GBNF) or a structural tag in JSON; it came as the field ``param``.

    ``is_strict``: what cannot be held exactly is refused. ``whitespace`` is an expression for what
    may stand between the parts of JSON; None: the default.
    """

    kind: FormatKind
    param: Name
    value: Annotated[str, Meta(max_length=MAX_FORMAT_CHARS)] = ""
    is_strict: bool = True
    whitespace: StopString | None = None


class ToolChoice(Row, frozen=True):
    """Whether ChatOptions' tools may be called or must be, only those with ``names`` if there are
    any, and more than one of them if ``is_parallel``."""

    kind: Literal["none", "auto", "required"]
    names: Annotated[list[Name], Meta(max_length=MAX_TOOLS)] = []
    is_parallel: bool = True


class ChoiceStart(Row, frozen=True):
    """A choice to make, and how much of it the gateway has already: a replay goes on from there.

    ``num_ids`` counts the choice's ids in the Submit's second buffer, ``num_marks`` its Marks,
    ``num_prompt_scored`` the tokens of the prompt whose logprobs are there.
    """

    choice: Int32
    num_ids: Int32 = 0
    num_chars: Int64 = 0
    num_prompt_scored: Int32 = 0
    num_marks: Int32 = 0


class Submit(Row, tag=10, frozen=True):
    """Gateway → tokenizer: one prompt. Buffers: the prompt; int32 ids that its choices have.

    ``kind`` text: UTF-8 bytes; ids: int32 token ids; chat: the JSON array of messages, UTF-8; pair:
    the JSON array of a query, a document and, if there is one, an instruction.
    ``owner`` names the API key it came with; empty: there are no keys. ``reasoning_budget`` is in
    tokens. Of what ``is_traced`` a SpanReport comes back from each service that worked on it.
    ``num_worker_deaths``: so many workers died while they computed it, and no token came since.
    ``left_scheduler`` handed it over, and gets it again only where there is no other.
    """

    request: Name
    attempt: Int32
    kind: PromptKind
    params: SamplingParams
    text: TextOptions
    choices: Annotated[list[ChoiceStart], Meta(min_length=1, max_length=MAX_CHOICES)]
    priority: Priority = 0
    cache_salt: Name = ""
    owner: Name = ""
    chat: ChatOptions | None = None
    format: OutputFormat | None = None
    tool_choice: ToolChoice | None = None
    reasoning_budget: Int32 | None = None
    is_traced: bool = False
    num_worker_deaths: Int32 = 0
    left_scheduler: Name = ""


class NewSequence(Row, frozen=True):
    """A choice of a prompt, under the name that it has from now on. ``num_emitted`` counts its ids
    in the Generate's second buffer; ``num_prompt_scored``: as in ChoiceStart."""

    request: Name
    choice: Int32 = 0
    num_emitted: Int32 = 0
    num_prompt_scored: Int32 = 0


class Generate(Row, tag=11, frozen=True):
    """Tokenizer → scheduler: a prompt and its choices, all of which are taken or none. Buffers:
    int32 ids of the prompt; int32 ids that its sequences have emitted before.

    ``priority``: of two that wait the lower number comes first. Only sequences with the same
    ``cache_salt`` share what is cached. The logprobs of the prompt come with choice 0 alone.
    ``num_worker_deaths`` and ``owner``: as in Submit.
    """

    request: Name
    attempt: Int32
    params: SamplingParams
    sequences: Annotated[list[NewSequence], Meta(min_length=1, max_length=MAX_CHOICES)]
    priority: Priority = 0
    cache_salt: Name = ""
    is_traced: bool = False
    num_worker_deaths: Int32 = 0
    owner: Name = ""


class RequestKey(Row, frozen=True):
    request: Name
    attempt: Int32


class Cancel(Row, tag=12, frozen=True):
    """Down both upper links: the client does not wait for these requests any more. A key that is
    unknown is ignored."""

    keys: list[RequestKey]


class Grant(Row, frozen=True):
    """One sequence may emit up to ``num_tokens`` tokens and ``num_bytes`` bytes in all."""

    request: Name
    attempt: Int32
    num_tokens: Int64
    num_bytes: Int64


class Credit(Row, tag=14, frozen=True):
    """Down both upper links, as clients take what came: a sequence without credit is not planned.

    Bytes are those of the arrays in Tokens and Deltas. An attempt begins with ``WINDOW_TOKENS`` and
    ``WINDOW_BYTES`` beyond what it resumes.
    """

    grants: list[Grant]


class Convert(Row, tag=15, frozen=True):
    """Gateway → tokenizer, beside the data path: what are the ids of this prompt, or its text, or
    where in the text does each token begin and end? Ids have a text only. Or, whatever the prompt,
    what is there to know of the tokenizer? Buffer: as in Submit. Answered by Converted, or Failed
    with attempt 0. ``max_prompt_tokens`` and ``keeps_prompt_start``: as in TextOptions; ``owner``:
    as in Submit."""

    request: Name
    kind: PromptKind
    adds_special_tokens: bool
    chat: ChatOptions | None = None
    to: ConvertedTo = "ids"
    max_prompt_tokens: Int32 | None = None
    keeps_prompt_start: bool = False
    owner: Name = ""


class Abort(Row, tag=16, frozen=True):
    """Gateway → every tokenizer: ends the requests that ``owner`` knows by these ids."""

    ids: list[Name]
    owner: Name = ""


class Inquire(Row, tag=17, frozen=True):
    """Down the chain, and from a tokenizer up to the gateways that did not ask: somebody looks at
    the mesh. Answered by a ServiceReport. A tokenizer and a scheduler pass it on, and the reports
    that come back. Peers below minor ``REPORT_MINOR`` do not know it."""


class Admit(Row, frozen=True):
    """A sequence enters a slot. It brings all known ids: the prompt, then what was emitted before.

    ``route`` groups the rows of a StepResult by the peer they go to. ``num_ids`` counts this row's
    ids in the plan's buffer, of which the first ``prompt_len`` are the prompt; ``num_cached`` of
    them have their KV in ``blocks`` already. ``num_prompt_scored``: as in ChoiceStart.
    """

    slot: Int32
    request: Name
    attempt: Int32
    route: Int64
    choice: Int32
    prompt_len: Int32
    num_ids: Int32
    num_cached: Int32
    params: SamplingParams
    blocks: list[Int32]
    num_prompt_scored: Int32 = 0
    is_traced: bool = False


class Extend(Row, frozen=True):
    slot: Int32
    blocks: list[Int32]


class Prefill(Row, frozen=True):
    slot: Int32
    num_tokens: Int32


class Decode(Row, frozen=True):
    """One token, and up to ``verify_depth`` of the slot's drafts are verified beside it."""

    slot: Int32
    verify_depth: Int32 = 0


class StepPlan(Row, tag=13, frozen=True):
    """Scheduler → worker: a step, or several, as a difference to the slots the worker holds.

    Applied in the order of the fields: a slot may be released and admitted anew in one plan.
    ``draft_depth``: how many drafts to make of each sequence that samples, for the next step.
    ``num_steps``: a plan that only decodes may ask for several. Each computes the same rows but
    for the sequences that have ended, with the token that was sampled last as the input.
    Buffer 0: int32 known ids of all ``admit`` rows, concatenated.
    """

    step: Int64
    release: list[Int32]
    admit: list[Admit]
    extend: list[Extend]
    prefill: list[Prefill]
    decode: list[Decode]
    draft_depth: Int32 = 0
    num_steps: NumSteps = 1


class Reset(Row, tag=18, frozen=True):
    """First rank of a worker → its others: the scheduler is gone, forget all sequences."""


class Assemble(Row, tag=32, frozen=True):
    """First rank of a worker → its others: all are connected, so load the model and meet."""


# --- coming up ------------------------------------------------------------------------------------


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


class OutputStart(IntEnum):
    """What the first token of a text belongs to: the answer or the reasoning, as the prompt ends,
    or the one that the model begins itself."""

    ANSWER = 0
    REASONING = 1
    UNDECIDED = 2


class Dropped(Row, frozen=True):
    """The oldest turns of a chat, which are not in its prompt, and the tokens that they had."""

    num_turns: Int32 = 0
    num_tokens: Int32 = 0


NOTHING_DROPPED = Dropped()


class Accepted(Row, tag=20, frozen=True):
    """All choices will run. Until it arrives, a gateway has sent no byte to the client.

    Buffer: int32 ids of the prompt; a scheduler, whose peer knows them, sends none. A tokenizer
    sets ``start``, ``dropped`` and ``left_out``, places in the request of what its schemas say and
    nothing holds.
    """

    request: Name
    attempt: Int32
    start: OutputStart = OutputStart.ANSWER
    dropped: Dropped = NOTHING_DROPPED
    left_out: Annotated[list[Name], Meta(max_length=MAX_LEFT_OUT)] = []


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


class TokenRow(Row, frozen=True):
    """Tokens of a sequence, after ``position`` others of its output or, for those of a prompt, of
    its prompt; drafts are for what comes from ``position`` on. ``num_cached`` ids of the prompt
    came from the prefix cache."""

    request: Name
    attempt: Int32
    position: Int32
    run: TokenRun
    num_cached: Int32 = 0


class Tokens(Row, tag=21, frozen=True):
    """Scheduler → tokenizer, one per peer and step; requests are named as sequences.

    Buffers, of all rows, concatenated: int32 ids; float32 logprobs; int32 ids of the likeliest;
    int32 ranks of the tokens (1: the likeliest), for the rows with values.
    """

    rows: list[TokenRow]
    finished: list[Finished]
    spans: list[SpanReport] = []


class Mark(Row, frozen=True):
    """An added token in the text of a choice: the output's token number ``index`` is ``token_id``.

    Its text begins ``position`` characters into the choice's, and has ``num_chars``, which may come
    later; 0: it is not shown.
    """

    position: Int64
    num_chars: Int32
    index: Int32
    token_id: Int32


class Delta(Row, frozen=True):
    """A TokenRow of one choice, and the text that became certain with its tokens.

    A Mark comes with the first character at its position, or before it.

    ``text`` may be empty while a character is incomplete, or come without a token. ``num_cached``
    is None where there is no token.
    """

    request: Name
    attempt: Int32
    choice: Int32
    position: Int32
    run: TokenRun
    text: str = ""
    num_cached: Int32 | None = None
    marks: list[Mark] = []


class Deltas(Row, tag=22, frozen=True):
    """Tokenizer → gateway, at most one per peer and incoming Tokens. Buffers: as Tokens."""

    rows: list[Delta]
    finished: list[Finished]
    spans: list[SpanReport] = []


class ResultRow(Row, frozen=True):
    """What one slot emitted in a step; rows are ordered by route. ``error`` fails the request, for
    what the client asks if there is a ``code`` for it, else for what is wrong here.

    A slot may have several rows, side by side: of its prompt, of its drafts, then of its output;
    where the plan asked for several steps, those of one step after those of another.
    """

    slot: Int32
    request: Name
    attempt: Int32
    run: TokenRun
    finish: FinishReason | None = None
    error: Reason | None = None
    code: Name = ""


class StepResult(Row, tag=23, frozen=True):
    """Worker → scheduler: the rows that emitted or ended. Buffers: as Tokens.

    The step took ``step_s``, after ``idle_s`` of waiting for its plan. It was ``num_steps`` steps:
    fewer than the plan asked for where all sequences have ended before.
    """

    step: Int64
    rows: list[ResultRow]
    step_s: Seconds = 0.0
    idle_s: Seconds = 0.0
    spans: list[SpanReport] = []
    num_steps: NumSteps = 1


class Release(Row, tag=25, frozen=True):
    """Worker → scheduler: take back my sequences, I leave before they would end. They go to others
    one at a time; at a second Release, all that are left."""


class Attach(Row, tag=30, frozen=True):
    """Worker → scheduler: plan for me. It is attached to no other. One below ``CELLS_MINOR`` sends
    none, and is attached from its Hello on."""


class Detach(Row, tag=31, frozen=True):
    """Worker → scheduler: plan for me no more. What it had of you it has forgotten."""


class Lost(Row, tag=26, frozen=True):
    """Tokenizer → gateway: the scheduler that had these is gone, or hands them over; submit them
    anew. No terminal. Scheduler → tokenizer: these prompts are handed over to another cell.

    ``is_explained``: see ``Peer``; none of the requests can have been the reason. Without keys:
    nor can those have been that were lost with it before, since it lives and stood still.
    ``scheduler`` is its instance. ``num_worker_deaths``: as in Submit.
    """

    keys: list[RequestKey]
    is_explained: bool = False
    scheduler: Name = ""
    num_worker_deaths: Int32 = 0


class Converted(Row, tag=27, frozen=True):
    """Tokenizer → gateway: the answer to Convert. Buffer: UTF-8 bytes of a text or of the JSON of
    tokenizer_config.json, int32 ids, or int64 offsets: for each token its first character in the
    text, and the one behind its last."""

    request: Name


class Vocabulary(Row, tag=28, frozen=True):
    """Tokenizer → gateway, once: how tokens are written.

    Buffers: the bytes of all tokens in order of ids, concatenated; int32 number of bytes of each.
    """


Ended = Literal["", "lost", "left"]


class ReportedPeer(Row, frozen=True):
    """A peer as its neighbour knows it: by its Hello and its last heartbeat, and by ``stats`` of
    the neighbour's own. One that has ``ended`` did so up to half a minute ago; ``left``: it said
    Bye."""

    service: ServiceName
    instance: Instance
    minor: Int32
    state: State
    reason: Reason
    load: Int64
    ended: Ended = ""
    round_trip_s: Seconds | None = None
    stats: Stats = {}


class ServiceReport(Row, tag=29, frozen=True):
    """Any service → who asked: how it fares, and which peers it has. ``was_ready``: it was before,
    if it is not now."""

    service: ServiceName
    instance: Instance
    state: State
    reason: Reason
    was_ready: bool
    uptime_s: Seconds
    peers: Annotated[list[ReportedPeer], Meta(max_length=MAX_REPORTED_PEERS)]
    stats: Stats


class Failed(Row, tag=24, frozen=True):
    """The one bad terminal of a request, up every link; the fields are those of
    ``errors.RequestError``. A scheduler names the prompt if it takes none of its sequences, and one
    of them if that breaks later."""

    request: Name
    attempt: Int32
    status: Annotated[int, Meta(ge=400, le=599)]
    error_type: Name
    code: Name
    message: Reason
    param: Name | None = None
    retry_after_s: Seconds | None = None


Message = (
    Hello
    | Heartbeat
    | Bye
    | Refused
    | Submit
    | Generate
    | Cancel
    | StepPlan
    | Reset
    | Assemble
    | Credit
    | Convert
    | Abort
    | Inquire
    | Accepted
    | Tokens
    | Deltas
    | StepResult
    | Failed
    | Release
    | Attach
    | Detach
    | Lost
    | Converted
    | Vocabulary
    | ServiceReport
)

TOKEN_ARRAYS = ({"i4"}, {"f4"}, {"i4"}, {"i4"})

# The arrays of a message, each of one dimension: the dtypes that each may have. Others have none.
ARRAYS: dict[type, tuple[set[str], ...]] = {
    Submit: ({"u1", "i4"}, {"i4"}),
    Generate: ({"i4"}, {"i4"}),
    StepPlan: ({"i4"},),
    Convert: ({"u1", "i4"},),
    Accepted: ({"i4"},),
    Tokens: TOKEN_ARRAYS,
    Deltas: TOKEN_ARRAYS,
    StepResult: TOKEN_ARRAYS,
    Converted: ({"u1", "i4", "i8"},),
    Vocabulary: ({"u1"}, {"i4"}),
}
