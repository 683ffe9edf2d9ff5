"""Messages between a gateway and a tokenizer: prompts go down, text comes up."""

from typing import Annotated, Literal

from msgspec import Meta, Raw

from shared.wire.messages.media import Media
from shared.wire.messages.ranges import (
    EMPTY_ROW,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_FORMAT_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    ConvertedTo,
    Int32,
    Int64,
    Json,
    Name,
    Priority,
    PromptKind,
    Row,
    StopString,
)
from shared.wire.messages.rows import Finished, SamplingParams, SpanReport, TokenRun


class TextOptions(Row, frozen=True):
    """Text processing by the tokenizer. It adds the ids of ``bad_words`` to SamplingParams.
    ``has_marks``: Deltas locate the added tokens of the vocabulary. A prompt of more than
    ``max_prompt_tokens`` keeps its last tokens, or its first if it ``keeps_prompt_start``.
    ``fits_max_tokens``: the context caps SamplingParams' ``max_tokens``."""

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
    """Input of a chat template in addition to the messages.

    ``tools`` and ``documents`` are JSON arrays, ``template_kwargs`` is a JSON object; empty: none.
    ``template`` replaces the model's. ``continues_final_message``: the prompt ends in the text of
    the last message, which the model continues. A prompt of more than ``history_limit`` tokens
    loses its oldest turns; 0: no limit.
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
    """The format a client requires of an output. ``value`` is a JSON schema, a regular expression,
    a JSON array of strings, a grammar (Lark or GBNF) or a structural tag in JSON, from the
    request's field ``param``.

    ``is_strict``: constraints that cannot be enforced exactly are refused. ``whitespace`` is an
    expression for the space between the parts of JSON; None: the default.
    """

    kind: FormatKind
    param: Name
    value: Annotated[str, Meta(max_length=MAX_FORMAT_CHARS)] = ""
    is_strict: bool = True
    whitespace: StopString | None = None


class ToolChoice(Row, frozen=True):
    """The use of ChatOptions' tools: forbidden, allowed or required. ``names``, if any, limits
    them; ``is_parallel`` allows several calls."""

    kind: Literal["none", "auto", "required"]
    names: Annotated[list[Name], Meta(max_length=MAX_TOOLS)] = []
    is_parallel: bool = True


class ChoiceStart(Row, frozen=True):
    """A choice, and the part of it the gateway already has: a replay continues from there.

    ``num_ids`` counts its ids in the Submit's second buffer, ``num_marks`` its Marks,
    ``num_prompt_scored`` the prompt tokens with known logprobs.
    """

    choice: Int32
    num_ids: Int32 = 0
    num_chars: Int64 = 0
    num_prompt_scored: Int32 = 0
    num_marks: Int32 = 0


class Submit(Row, tag=10, frozen=True):
    """Gateway → tokenizer: one prompt. Buffers: the prompt; int32 ids its choices already have.

    ``kind`` text: UTF-8 bytes; ids: int32 token ids; chat: the JSON array of messages, UTF-8; pair:
    the JSON array of a query, a document and, if there is one, an instruction. ``reasoning_budget``
    is in tokens. ``options`` is a row of RequestOptions. Peers below minor ``OPTIONS_MINOR`` send
    and read the ``old_`` fields instead (``older.py``). Each of ``media`` has a further buffer, its
    file: parts of a chat name them by number, ids have a run of placeholders for each, in order.
    ``media_options``: vLLM's ``mm_processor_kwargs``, a JSON object.
    """

    request: Name
    attempt: Int32
    kind: PromptKind
    params: SamplingParams
    text: TextOptions
    choices: Annotated[list[ChoiceStart], Meta(min_length=1, max_length=MAX_CHOICES)]
    old_priority: Priority = 0
    old_salt: Name = ""
    old_owner: Name = ""
    chat: ChatOptions | None = None
    format: OutputFormat | None = None
    tool_choice: ToolChoice | None = None
    reasoning_budget: Int32 | None = None
    old_is_traced: bool = False
    old_num_worker_deaths: Int32 = 0
    old_left_scheduler: Name = ""
    options: Raw = EMPTY_ROW
    media: Media = []
    media_options: Json = ""


class Convert(Row, tag=15, frozen=True):
    """Gateway → tokenizer, apart from the data path: asks for the ids or the text of a prompt, the
    offsets of its tokens in the text, or, with any prompt, facts of the tokenizer. Ids convert to
    text only. Buffer: as in Submit. Answered by Converted, or by Failed with attempt 0.
    ``max_prompt_tokens`` and ``keeps_prompt_start``: as in TextOptions; ``owner``: as in
    RequestOptions; ``media``, their buffers and ``media_options``: as in Submit."""

    request: Name
    kind: PromptKind
    adds_special_tokens: bool
    chat: ChatOptions | None = None
    to: ConvertedTo = "ids"
    max_prompt_tokens: Int32 | None = None
    keeps_prompt_start: bool = False
    owner: Name = ""
    media: Media = []
    media_options: Json = ""


class Abort(Row, tag=16, frozen=True):
    """Gateway → every tokenizer: ends the requests with these client-visible ids of ``owner``."""

    ids: list[Name]
    owner: Name = ""


class Mark(Row, frozen=True):
    """An added token in the text of a choice: token number ``index`` of the output is ``token_id``.

    Its text begins at character ``position`` of the choice's text and has ``num_chars``, which may
    arrive later; 0: it is not shown.
    """

    position: Int64
    num_chars: Int32
    index: Int32
    token_id: Int32


class Delta(Row, frozen=True):
    """A TokenRow of one choice, and the text that its tokens complete.

    A Mark arrives before or with the character at its position. ``text`` may be empty while a
    character is incomplete, or arrive without a token. ``num_cached`` is None without a token.
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


class Converted(Row, tag=27, frozen=True):
    """Tokenizer → gateway: the answer to Convert. Buffer: UTF-8 bytes of a text or of
    tokenizer_config.json's JSON, int32 ids, or int64 offsets: for each token the index of its first
    character in the text and the index after its last."""

    request: Name


class Vocabulary(Row, tag=28, frozen=True):
    """Tokenizer → gateway, once: the bytes of every token.

    Buffers: the bytes of all tokens in order of ids, concatenated; int32 number of bytes of each.
    """
