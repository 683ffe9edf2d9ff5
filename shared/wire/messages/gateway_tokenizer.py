"""Messages between a gateway and a tokenizer: prompts go down, text comes up."""

from typing import Annotated, Literal

from msgspec import Meta, Raw

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
    ``reasoning_budget`` is in tokens. ``options`` is a row of RequestOptions. Peers below minor
    ``OPTIONS_MINOR`` send and read the ``old_`` fields instead (``older.py``).
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


class Convert(Row, tag=15, frozen=True):
    """Gateway → tokenizer, beside the data path: what are the ids of this prompt, or its text, or
    where in the text does each token begin and end? Ids have a text only. Or, whatever the prompt,
    what is there to know of the tokenizer? Buffer: as in Submit. Answered by Converted, or Failed
    with attempt 0. ``max_prompt_tokens`` and ``keeps_prompt_start``: as in TextOptions; ``owner``:
    as in RequestOptions."""

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


class Converted(Row, tag=27, frozen=True):
    """Tokenizer → gateway: the answer to Convert. Buffer: UTF-8 bytes of a text or of the JSON of
    tokenizer_config.json, int32 ids, or int64 offsets: for each token its first character in the
    text, and the one behind its last."""

    request: Name


class Vocabulary(Row, tag=28, frozen=True):
    """Tokenizer → gateway, once: how tokens are written.

    Buffers: the bytes of all tokens in order of ids, concatenated; int32 number of bytes of each.
    """
