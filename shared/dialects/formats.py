"""Descriptions of the formats of tool calls and reasoning, by family of models; no code.

A *marker* is a text that begins or ends a part of the output. In the vocabulary of most models it
is an added token, otherwise plain text.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

IdForm = Literal["call", "kimi", "mistral"]
ReasoningStart = Literal["prompt", "model", "always"]


@dataclass(frozen=True, slots=True)
class JsonLayout:
    """A call is an object of a name and arguments; ``is_list``: all calls are one array."""

    arguments_key: str = "arguments"
    is_list: bool = False
    name_key: str = "name"


@dataclass(frozen=True, slots=True)
class TaggedLayout:
    """A call is ``function_open`` name ``name_close`` parameters ``function_close``, a parameter is
    ``parameter_open`` name ``name_close`` value ``parameter_close``.

    ``line_end`` follows the function's name and every parameter; ``value_padding`` stands on both
    sides of a value. Strings are written literally, other values as JSON. With ``index_open`` it
    and the call's number follow the function's name. With ``type_open`` it and the word for the
    value's type follow the parameter's name; ``type_words`` are by type of JSON. ``escapes`` are
    written in names.
    """

    function_open: str = "<function="
    parameter_open: str = "<parameter="
    name_close: str = ">"
    parameter_close: str = "</parameter>"
    function_close: str = "</function>"
    line_end: str = "\n"
    value_padding: str = ""
    index_open: str = ""
    type_open: str = ""
    type_words: Mapping[str, str] = field(default_factory=dict)
    escapes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PairsLayout:
    """A call is the function's name, ``name_close``, then keys and values in turn, each in its own
    markers and, like the name, followed by ``line_end``. Strings are written literally, other
    values as JSON."""

    key_open: str = "<arg_key>"
    key_close: str = "</arg_key>"
    value_open: str = "<arg_value>"
    value_close: str = "</arg_value>"
    line_end: str = "\n"
    name_close: str = ""


@dataclass(frozen=True, slots=True)
class PythonicLayout:
    """Calls in Python's syntax with named arguments, between ``open`` and ``close``, with
    ``separator`` between two."""

    open: str = "["
    close: str = "]"
    separator: str = ", "


@dataclass(frozen=True, slots=True)
class BareLayout:
    """A call is ``name_open`` name and an object as in JSON, but keys are bare, and a string stands
    literally between two ``quote``."""

    name_open: str = "call:"
    quote: str = '<|"|>'


@dataclass(frozen=True, slots=True)
class ElementsLayout:
    """A call is ``function_open`` name ``name_close`` elements ``function_close``. An element is a
    parameter, a member of an object or, named ``item``, an item of an array: ``tag_open`` name
    ``tag_close`` value ``tag_open`` slash name ``tag_close``. Strings are written literally, other
    values that are no elements as JSON."""

    function_open: str
    function_close: str
    tag_open: str
    name_close: str = '">'
    tag_close: str = ">"
    item: str = "item"


@dataclass(frozen=True, slots=True)
class MarkedNameLayout:
    """A call is ``kind kind_close name_open`` name ``arguments_open`` a JSON object
    ``arguments_close``. With ``index_open`` it and the call's number follow the name; a model may
    write ``id_open`` and an id there."""

    arguments_open: str
    arguments_close: str = ""
    kind: str = ""
    kind_close: str = ""
    name_open: str = ""
    index_open: str = ""
    id_open: str = ""


@dataclass(frozen=True, slots=True)
class HarmonyLayout:
    """A reply is messages, each with a channel and a recipient in its header: a message to
    ``recipient_open`` and a name is a call, one in the channel ``analysis`` is reasoning."""

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    end: str = "<|end|>"
    end_of_calls: str = "<|call|>"
    end_of_reply: str = "<|return|>"
    recipient_open: str = "functions."


@dataclass(frozen=True, slots=True)
class BlocksLayout:
    """A reply is blocks, each ``start``, the marker of its kind, its text and ``end``. A call is an
    object of a name and arguments, and its name stands before the marker, too."""

    start: str = "<|message_model|>"
    reasoning: str = "<|content_thinking|>"
    text: str = "<|content_text|>"
    call: str = "<|content_invoke_tool_json|>"
    end: str = "<|end_message|>"
    end_of_reply: str = "<|content_model_end_sampling|>"
    arguments_key: str = "args"


@dataclass(frozen=True, slots=True)
class AddressedLayout:
    """A reply is messages, each with a recipient in its header: ``self`` for reasoning, ``user``
    for the answer, and a function for calls in a layout of their own."""

    start: str = "<|start|>"
    message: str = "<|message|>"
    end: str = "<|eom|>"
    end_of_reply: str = "<|eot|>"


Channels = HarmonyLayout | BlocksLayout | AddressedLayout
Layout = (
    JsonLayout
    | TaggedLayout
    | PairsLayout
    | PythonicLayout
    | BareLayout
    | ElementsLayout
    | MarkedNameLayout
    | Channels
)


def _texts_of(layout: Layout) -> frozenset[str]:
    texts = (getattr(layout, each.name) for each in fields(layout))
    return frozenset(text for text in texts if isinstance(text, str) and text.strip())


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of calls: ``section_open`` call … ``section_close``, and each call as
    ``call_open`` layout ``call_close``, with ``separator`` between two. ``padding`` stands inside
    the outer of these markers. Empty markers are not written. ``tokens`` may be added tokens, of
    which longer markers are made.

    ``is_tagless``: the model may omit the first marker, so a reply that begins like a call is one.
    Calls stand in a ``frame``, if there is one.
    """

    name: str
    layout: Layout
    aliases: tuple[str, ...] = ()
    section_open: str = ""
    section_close: str = ""
    call_open: str = ""
    call_close: str = ""
    padding: str = ""
    separator: str = ""
    ids: IdForm = "call"
    is_tagless: bool = False
    tokens: tuple[str, ...] = ()
    frame: AddressedLayout | None = None

    @property
    def channels(self) -> Channels | None:
        return self.layout if isinstance(self.layout, Channels) else self.frame

    @property
    def outer_markers(self) -> frozenset[str]:
        """Markers around calls, the frame's too."""
        texts = (self.section_open, self.section_close, self.call_open, self.call_close)
        of_frame = _texts_of(self.frame) if self.frame is not None else frozenset[str]()
        return of_frame | frozenset(filter(None, texts))

    @property
    def markers(self) -> frozenset[str]:
        """All texts a parser looks for; some of them are added tokens."""
        is_json = isinstance(self.layout, JsonLayout)
        return self.outer_markers | (frozenset() if is_json else _texts_of(self.layout))


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The format of reasoning: ``open`` reasoning ``close`` answer.

    ``begins`` is the state after a prompt that ends in neither marker: ``prompt``, only a prompt
    opens reasoning, so this is the answer; ``model``, the model may open it; ``always``, it has
    begun. ``label`` may follow ``open`` and is no part of the reasoning. ``forced_close`` is
    written to end it early. ``answer_open`` and ``answer_close`` surround the answer and are not
    part of it, nor are ``ends``, wherever they stand: the first ends an answer, the others the
    reply. ``tokens`` are as in ToolFormat.
    With ``channels`` it is a part of these; in harmony's nothing alone opens or closes it.
    """

    name: str
    open: str = "<think>"
    close: str = "</think>"
    begins: ReasoningStart = "model"
    aliases: tuple[str, ...] = ()
    label: str = ""
    forced_close: str = "\n</think>\n\n"
    answer_open: str = ""
    answer_close: str = ""
    ends: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    channels: Channels | None = None

    @property
    def markers(self) -> frozenset[str]:
        if self.channels is not None:
            return _texts_of(self.channels)
        texts = (self.open, self.close, self.answer_open, self.answer_close, *self.ends)
        return frozenset(filter(None, texts))


class Formats:
    """The formats of families, by the names of parsers and their aliases; the defaults know
    none."""

    tools: Mapping[str, ToolFormat] = {}
    reasoning: Mapping[str, ReasoningFormat] = {}

    def find_tools(self, name: str, added_tokens: Container[str]) -> ToolFormat | None:
        """The format of a parser's name for a vocabulary; None for an unknown name."""
        return self.tools.get(name)

    def find_reasoning(self, name: str, added_tokens: Container[str]) -> ReasoningFormat | None:
        """As ``find_tools``."""
        return self.reasoning.get(name)

    def recognise(self, template: str, added_tokens: Container[str]) -> tuple[str, str]:
        """The names of a model's tool parser and reasoning parser; empty: none."""
        return "", ""
