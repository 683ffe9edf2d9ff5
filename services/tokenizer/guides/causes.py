"""Which part of a request makes its grammar wrong, and why, without words of our own grammars."""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from services.tokenizer.guides.compose import Wanted
from services.tokenizer.guides.gbnf import gbnf_to_lark, is_gbnf
from services.tokenizer.guides.limits import Totals
from services.tokenizer.guides.schema import checked, guided, read_json
from services.tokenizer.guides.tools import arguments, read_tools
from shared.wire.messages import OutputFormat, ToolChoice

_QUOTE = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_HINT = re.compile(r"\. Enable '\w+' option.*")
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A grammar in a client's own words, which came as the field ``param``."""

    param: str
    grammar: str


def parts_of(wanted: Wanted, unheld: frozenset[str] = frozenset()) -> list[GrammarPart]:
    """The parts of ``wanted`` that are a grammar by themselves, without the ``unheld`` probes.
    ``wanted`` composes without an error."""
    totals, parts = Totals(unheld=unheld), []
    choice = wanted.choice or ToolChoice("auto")
    if wanted.tools and choice.kind != "none":
        parts += [
            GrammarPart(f"{tool.param}.parameters", _written("json_schema", arguments(tool)))
            for tool in read_tools(wanted.tools, choice, totals)
        ]
    if wanted.format is not None and choice.kind != "required":
        parts += _parts_of_format(wanted.format, totals)
    return parts


def _parts_of_format(format: OutputFormat, totals: Totals) -> list[GrammarPart]:
    value, param = format.value, format.param
    if format.kind == "json_schema":
        schema = checked(read_json(value, param), param, totals, format.is_strict)
        schema = guided(schema, format.is_strict, format.whitespace)
        return [GrammarPart(param, _written("json_schema", schema))]
    if format.kind == "grammar":
        grammar = gbnf_to_lark(value, param) if is_gbnf(value) else value
        return [GrammarPart(param, _written("lark_grammar", grammar))]
    return []


def _written(kind: str, grammar: Any) -> str:
    return msgspec.json.encode({"grammars": [{kind: grammar}]}).decode()


def cause(error: str, is_of_part: bool) -> str:
    """llguidance's ``error`` without quoted text, and without places in a grammar that is not
    the client's."""
    error = _HINT.sub("", _QUOTE.sub("", error))
    return error if is_of_part else _PLACE.sub("", error)
