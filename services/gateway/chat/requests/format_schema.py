"""Fields for the form of a text, in the words of OpenAI, vLLM, vLLM before 0.12 (``guided_…``) and
SGLang."""

from typing import Annotated

from msgspec import Meta, Raw, Struct

from services.gateway.chat.requests.raw_json import NULL
from shared.wire.messages import MAX_STOP_CHARS
from shared.wire.sampling_fields import SamplingFields

Whitespace = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Expression = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]


class AnyText(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class JsonObject(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """``schema`` is accepted by servers without ``json_schema``."""

    schema: Raw = NULL


class NamedSchema(Struct, forbid_unknown_fields=True):
    """The model does not see ``name`` and ``description``."""

    schema: Raw
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchema(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    json_schema: NamedSchema


class StructuralTag(
    Struct,
    tag_field="type",
    tag="structural_tag",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Either a ``format``, or ``structures`` and the ``triggers`` that begin them."""

    format: Raw = NULL
    structures: Raw = NULL
    triggers: Raw = NULL


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    json: Raw = NULL
    regex: Expression | None = None
    choice: Choices | None = None
    grammar: Expression | None = None
    json_object: bool | None = None
    structural_tag: Raw = NULL
    whitespace_pattern: Whitespace | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class FormatFields(SamplingFields, kw_only=True):  # a Struct has one base
    response_format: AnyText | JsonObject | JsonSchema | StructuralTag | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = NULL
    guided_regex: Expression | None = None
    guided_choice: Choices | None = None
    guided_grammar: Expression | None = None
    guided_whitespace_pattern: Whitespace | None = None
    regex: Expression | None = None
    ebnf: Expression | None = None
    json_schema: Raw = NULL
    structural_tag: Raw = NULL
