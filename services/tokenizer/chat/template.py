"""One chat template in the format of Hugging Face models, in jinja's sandbox.

The time of a template (see ``bounded.py``) and the length of its output are bounded. Its memory is
not: filters like ``center`` make large values from small ones.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro

from services.tokenizer.chat.bounded import BoundedEnvironment, Clock
from services.tokenizer.chat.template_traits import TemplateTraits, traits_of
from shared.text.surrogates import without_halves

# Errors raised by a template itself, and Python errors from its operations.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class TooMuchText(Exception):
    """A template wrote more characters than it may."""

    def __init__(self, num_chars: int) -> None:
        super().__init__(f"more than {num_chars} characters")
        self.num_chars = num_chars


class ChatTemplate:
    """A compiled template; ``traits`` describe the form of messages that it expects.

    It offers the functions and tags of transformers' ``apply_chat_template``. Raises one of
    ``TEMPLATE_ERRORS`` for a source that does not compile.
    """

    def __init__(self, source: str) -> None:
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Clock, loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        tree = environment.parse(source)
        self.traits: TemplateTraits = traits_of(tree)
        self._environment = environment
        self._template = environment.from_string(environment.bounded(tree))

    def render(self, variables: Mapping[str, Any], max_chars: int) -> str:
        """Raises one of ``TEMPLATE_ERRORS`` if the template fails, TooMuchText if it writes more
        than ``max_chars``, TooMuchTime if it takes more than ``MAX_RENDER_S``."""
        self._environment.begin()
        pieces, num_chars = [], 0
        for piece in self._template.generate(variables):
            num_chars += len(piece)
            if num_chars > max_chars:
                raise TooMuchText(max_chars)
            pieces.append(piece)
        return without_halves("".join(pieces))


class _Generation(Extension):
    """``{% generation %}`` marks text that a model is trained to write; the text is unchanged."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_write"), [], [], body)
        return block.set_lineno(line)

    def _write(self, caller: Macro) -> str:
        return str(caller())


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
