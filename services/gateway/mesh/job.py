"""A client's request as the mesh needs it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from shared.wire.codec import Array
from shared.wire.envelope import RequestOptions
from shared.wire.messages import (
    MINORS,
    ChatOptions,
    Medium,
    OutputFormat,
    PromptKind,
    SamplingParams,
    TextOptions,
    ToolChoice,
)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file in a prompt, [n] uint8."""

    medium: Medium
    data: Array


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; ``data`` and the files of ``media`` are buffers that travel with ``Submit``.
    ``media_options`` are the client's for them, a JSON object."""

    kind: PromptKind
    data: Array
    media: Sequence[Attachment] = ()
    media_options: str = ""

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + sum(each.data.nbytes for each in self.media)

    @property
    def minor(self) -> int:
        """The protocol that a tokenizer needs for it."""
        return max((MINORS[each.medium.kind] for each in self.media), default=0)


def chat_bytes(chat: ChatOptions | None) -> int:
    """The bytes held by the options."""
    if chat is None:
        return 0
    texts = (chat.tools, chat.documents, chat.template_kwargs, chat.template)
    return sum(len(text.encode()) for text in texts)


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the text of a chat becomes reasoning, content and calls.

    ``tool_parser`` and ``reasoning_parser`` are names of formats; empty: calls or reasoning are not
    looked for. ``tools`` is the JSON array of the tools that may be called. Reasoning is content
    unless the reply ``separates_reasoning``, and dropped unless it ``shows_reasoning``; everything
    after the first call is dropped unless it ``is_parallel``. ``is_held``: the text ends by itself
    after its calls. ``is_named``, ``is_legacy``: as in Tools.
    """

    tool_parser: str
    reasoning_parser: str
    tools: str
    separates_reasoning: bool
    shows_reasoning: bool
    is_parallel: bool
    is_held: bool
    is_named: bool
    is_legacy: bool

    @property
    def splits_reasoning(self) -> bool:
        """Whether the reply separates reasoning from content."""
        return bool(self.reasoning_parser) and self.separates_reasoning


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts, the number of choices for each, and the form of the reply.

    ``model`` is the name used by the client, one of the names we serve. Choices are numbered
    through all prompts: first the choices of the first prompt, then of the second. All services get
    its ``options``. The reply ``echoes`` the prompt before the text and in its logprobs,
    ``returns_ids``, ``returns_prompt_text``, and ``returns_offsets`` of its tokens in that text. It
    names the tokens of logprobs by their text or ``names_by_id``, or has vLLM's objects
    (``logprobs_by_id``); ``num_prompt_logprobs`` were asked for in addition to
    ``num_echoed_logprobs``, the prompt's own. A prompt is replaced by its
    ids when the mesh has sent them. ``request_id`` is the client's own. ``field_names`` maps the
    mesh's ``prompt`` and ``max_tokens`` to the client's names, where they differ. Unless it
    ``is_seeded`` by the client, each prompt has its own seed. The reply to a chat begins with
    ``first_text``. Without ``parsing`` a text is content. A stream ``repeats_usage`` in every
    chunk. ``kept_bytes`` are held in addition to the Job until the request ends; if it
    ``keeps_logprobs``, they are held as JSON, in streams too. ``warnings`` name ignored fields of
    the request. The mesh has up to ``max_open_prompts`` at once; None: all. A stream has a chunk
    for each ``stream_interval`` tokens of a choice.
    """

    model: str
    prompts: list[Prompt]
    num_choices: int
    params: SamplingParams
    text: TextOptions
    options: RequestOptions
    is_stream: bool
    includes_usage: bool
    echoes: bool = False
    is_seeded: bool = True
    returns_ids: bool = False
    returns_prompt_text: bool = False
    returns_offsets: bool = False
    names_by_id: bool = False
    logprobs_by_id: bool = False
    num_prompt_logprobs: int | None = None
    num_echoed_logprobs: int | None = None
    request_id: str | None = None
    field_names: dict[str, str] = field(default_factory=dict)
    chat: ChatOptions | None = None
    format: OutputFormat | None = None
    tool_choice: ToolChoice | None = None
    reasoning_budget: int | None = None
    parsing: Parsing | None = None
    first_text: str = ""
    repeats_usage: bool = False
    kept_bytes: int = 0
    keeps_logprobs: bool = False
    warnings: tuple[str, ...] = ()
    max_open_prompts: int | None = None
    stream_interval: int = 1

    def of_owner(self, owner: str, *, shares_cache: bool) -> "Job":
        """The job of an API key; other keys find its cached prefixes only if keys share them."""
        salt = self.options.salt
        if owner and not shares_cache:
            salt = f"{owner} {salt}"
        return replace(self, options=structs.replace(self.options, owner=owner, salt=salt))

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the mesh sends the logprobs of the prompts."""
        return self.params.prompt_logprobs is not None

    @property
    def prompt_bytes(self) -> int:
        return sum(prompt.num_bytes for prompt in self.prompts)

    @property
    def option_bytes(self) -> int:
        format_bytes = len(self.format.value.encode()) if self.format is not None else 0
        first_bytes = len(self.first_text.encode())
        return chat_bytes(self.chat) + format_bytes + first_bytes + self.kept_bytes

    @property
    def total_choices(self) -> int:
        return len(self.prompts) * self.num_choices
