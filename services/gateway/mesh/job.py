"""A client's request as the mesh needs it."""

from dataclasses import dataclass, field, replace

from msgspec import structs

from shared.wire.codec import Array
from shared.wire.envelope import RequestOptions
from shared.wire.messages import (
    ChatOptions,
    OutputFormat,
    PromptKind,
    SamplingParams,
    TextOptions,
    ToolChoice,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; ``data`` is the buffer that travels with ``Submit``."""

    kind: PromptKind
    data: Array


def chat_bytes(chat: ChatOptions | None) -> int:
    """What the options hold."""
    if chat is None:
        return 0
    texts = (chat.tools, chat.documents, chat.template_kwargs, chat.template)
    return sum(len(text.encode()) for text in texts)


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the text of a chat becomes reasoning, content and calls.

    ``tool_parser`` and ``reasoning_parser`` are names of formats; empty: of these nothing is
    looked for. ``tools`` is the JSON array of those that may be called. What was reasoned is
    content unless the reply ``separates_reasoning``, and dropped unless it ``shows_reasoning``;
    what follows the first call is dropped unless it ``is_parallel``. ``is_held``: the text ends
    behind its calls by itself. ``is_named``, ``is_legacy``: as in Tools.
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
        """Whether the reply tells reasoning from content."""
        return bool(self.reasoning_parser) and self.separates_reasoning


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts, how many choices to make of each, and how to reply.

    ``model`` is the name the client used, one of those we serve. The choices of all prompts are
    numbered through: those of the first prompt, then those of the second. All services get its
    ``options``. The reply ``echoes`` the prompt before the text and in its logprobs, and
    ``returns_ids`` beside it, ``returns_prompt_text``, and ``returns_offsets`` of its tokens in
    that text. It names the tokens of logprobs by their text or ``names_by_id``;
    ``num_prompt_logprobs`` were asked for beside the prompt's own, which are
    ``num_echoed_logprobs``. A prompt is replaced by its ids when the mesh has sent them.
    ``request_id`` is the client's own. ``field_names`` are the client's words for what the mesh
    calls ``prompt`` and ``max_tokens``, where they differ. Unless it ``is_seeded`` by the client
    each prompt has a seed of its own. The reply to a chat begins with ``first_text``. Without
    ``parsing`` a text is content. A stream ``repeats_usage`` in every chunk. ``kept_bytes`` are
    held beside the Job until the request ends; where it ``keeps_logprobs``, they are held as JSON,
    those of a stream too. ``warnings`` name what the client asked for in vain. The mesh has up to
    ``max_open_prompts`` at once; None: all. A stream has a chunk for each ``stream_interval``
    tokens of a choice.
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
        """The job of an API key, whose cached prefixes no other key finds unless keys share
        them."""
        salt = self.options.salt
        if owner and not shares_cache:
            salt = f"{owner} {salt}"
        return replace(self, options=structs.replace(self.options, owner=owner, salt=salt))

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the mesh brings the logprobs of the prompts."""
        return self.params.prompt_logprobs is not None

    @property
    def prompt_bytes(self) -> int:
        return sum(prompt.data.nbytes for prompt in self.prompts)

    @property
    def option_bytes(self) -> int:
        format_bytes = len(self.format.value.encode()) if self.format is not None else 0
        first_bytes = len(self.first_text.encode())
        return chat_bytes(self.chat) + format_bytes + first_bytes + self.kept_bytes

    @property
    def total_choices(self) -> int:
        return len(self.prompts) * self.num_choices
