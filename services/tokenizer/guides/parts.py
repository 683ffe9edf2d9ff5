"""The smallest parts of a grammar that come from a client: each adds its rules to a grammar and
returns the expression for it."""

import re

import msgspec

from services.tokenizer.guides.gbnf import gbnf_to_lark, is_gbnf
from services.tokenizer.guides.json_rule import json_rule
from services.tokenizer.guides.lark import Lark, literal, regex
from services.tokenizer.guides.limits import (
    MAX_CHOICES_BYTES,
    MAX_CHOICES_IN_LIST,
    MAX_GRAMMAR_INPUT_CHARS,
    MAX_RULES,
    check_limit,
    check_regex,
    invalid,
)
from services.tokenizer.guides.schema import Schema, guided
from shared.wire.messages import OutputFormat

_RULE = re.compile(
    r"^[ \t]*+[?!]?[A-Za-z_][\w-]*+(?:\.-?\d++)?[ \t]*+(?:\[[^\]\n]*+\])?[ \t]*+:", re.MULTILINE
)


def json_part(lark: Lark, schema: Schema, format: OutputFormat) -> str:
    if format.whitespace is not None:
        check_regex(format.param, format.whitespace)
    return json_rule(lark, guided(schema, format.is_strict, format.whitespace))


def regex_part(lark: Lark, expression: str, param: str) -> str:
    check_regex(param, expression)
    return lark.terminal(regex(expression))


def choice_part(lark: Lark, choices: str, param: str) -> str:
    """One terminal for all: alternatives of a rule would take a choice that begins a longer one."""
    check_limit(param, "bytes of choices", len(choices.encode()), MAX_CHOICES_BYTES)
    try:
        texts = msgspec.json.decode(choices, type=list[str])
    except (msgspec.DecodeError, RecursionError):
        raise invalid(param, "the choices are a list of strings") from None
    check_limit(param, "choices", len(texts), MAX_CHOICES_IN_LIST)
    if not texts:
        raise invalid(param, "the list of choices is empty")
    return lark.terminal(" | ".join(map(literal, texts)))


def grammar_part(lark: Lark, grammar: str, param: str) -> str:
    """A grammar in Lark or GBNF."""
    check_limit(param, "characters of a grammar", len(grammar), MAX_GRAMMAR_INPUT_CHARS)
    if is_gbnf(grammar):
        return lark.grammar(gbnf_to_lark(grammar, param))
    num_rules = sum(1 for _ in _RULE.finditer(grammar))
    check_limit(param, "rules and terminals", num_rules, MAX_RULES)
    return lark.grammar(grammar)
