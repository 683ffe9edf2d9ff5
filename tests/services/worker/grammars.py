"""Grammars of outputs, and the ids of texts."""

from functools import cache

import msgspec
from llguidance import grammar_from
from tokenizers import Tokenizer

from shared.model_folder import EMBEDDED_MODEL

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "[ ]{0,1}"},
}
GRAMMARS = {
    "schema": grammar_from("json_schema", msgspec.json.encode(PERSON).decode()),
    "expression": grammar_from("regex", "[a-f]{3,9}(, [0-9]{1,2}){0,2}"),
    "choice": grammar_from("choice", '["yes", "no", "nothing at all"]'),
    "Lark": 'start: "(" (start | "x"){1,3} ")"',
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))


def encode(text: str) -> list[int]:
    return tokenizer().encode(text).ids
