"""The body of a request to ``/v1/responses``; null means the default."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from services.gateway.chat.requests.raw_json import NULL
from services.gateway.chat.requests.schema import (
    ChatTemplate,
    Effort,
    GenerationRequest,
    NumTokens,
)
from services.gateway.chat.requests.tool_schema import ToolName
from services.gateway.chat.requests.unsupported import COMMON, Neutral
from shared.wire.messages import MAX_NAME_CHARS, MAX_TOOLS

MAX_METADATA = 16
MAX_TOP_LOGPROBS = 20
MAX_SCHEMA_NAME_CHARS = 64

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"

Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Parts that no reply of ours has.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Identifier = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
MetadataKey = Annotated[str, Meta(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)]
Summary = Literal["auto", "concise", "detailed"]


class AnyText(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class JsonObject(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    pass


class JsonSchema(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """The model does not see ``name`` and ``description``."""

    schema: Raw
    name: Annotated[str, Meta(max_length=MAX_SCHEMA_NAME_CHARS)] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, forbid_unknown_fields=True):
    format: AnyText | JsonObject | JsonSchema | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Struct, forbid_unknown_fields=True):
    """``generate_summary`` is an older name of ``summary``."""

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class FunctionTool(Struct, tag_field="type", tag="function"):
    """``parameters`` is a JSON schema; without one the function takes none."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AnyInput(Struct, tag_field="type", tag="text"):
    pass


class GrammarInput(Struct, tag_field="type", tag="grammar"):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(Struct, tag_field="type", tag="custom"):
    """Its input is a text, not JSON."""

    name: ToolName
    description: str | None = None
    format: AnyInput | GrammarInput | None = None


class Namespace(Struct, tag_field="type", tag="namespace"):
    """Functions that belong together."""

    name: ToolName
    tools: Annotated[list[FunctionTool], Meta(min_length=1, max_length=MAX_TOOLS)]
    description: str | None = None


class NamedFunction(Struct, tag_field="type", tag="function"):
    name: str


class NamedCustom(Struct, tag_field="type", tag="custom"):
    name: str


class AllowedTools(Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction | NamedCustom], Meta(min_length=1, max_length=MAX_TOOLS)]


ToolChoiceField = Literal["none", "auto", "required"] | NamedFunction | NamedCustom | AllowedTools


class ResponseRequest(GenerationRequest, kw_only=True):
    """Fields common to both kinds of request have the same meaning; some of them are refused
    here."""

    input: Raw
    background: bool | None = None
    instructions: str | None = None
    tools: Raw = NULL
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: NumTokens | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[Included], Meta(max_length=16)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_output_tokens: NumTokens | None = None
    store: bool | None = None
    previous_response_id: Identifier | None = None
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    documents: Raw = NULL
    chat_template: ChatTemplate | None = None
    chat_template_kwargs: Raw = NULL
    truncation: Literal["auto", "disabled"] | None = None
    mm_processor_kwargs: Raw = NULL

    def includes(self, what: str) -> bool:
        return self.include is not None and what in self.include


class ContentPart(Struct, omit_defaults=True):
    """A piece of a message, of a call's output or of reasoning. The last fields are an image's."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None


class Item(Struct, omit_defaults=True):
    """An input item; its type determines the fields that count."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None


NEUTRAL: Neutral = COMMON | {
    "access_programs": ([],),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "echo": (False,),
    "image": (),
    "include_draft_logprobs": (False,),
    "logprobs": (False,),
    "lora_path": (),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": (),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
}
"""As in ``unsupported.py``."""
