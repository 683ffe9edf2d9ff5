"""What a client wants a text to be, as a part of a grammar."""

from services.tokenizer.guides.lark import Lark
from services.tokenizer.guides.limits import Totals
from services.tokenizer.guides.parts import choice_part, grammar_part, json_part, regex_part
from services.tokenizer.guides.schema import checked, read_json
from services.tokenizer.guides.structural_tag import structural_tag
from shared.wire.messages import OutputFormat


def format_part(lark: Lark, format: OutputFormat, totals: Totals) -> str:
    """Adds what ``format`` needs to ``lark`` and returns the expression for it.

    Raises InvalidRequest whose ``param`` is the place in the client's request.
    """
    value, param = format.value, format.param
    match format.kind:
        case "json_object":
            return json_part(lark, {"type": "object"}, format)
        case "json_schema":
            schema = checked(read_json(value, param), param, totals, format.is_strict)
            return json_part(lark, schema, format)
        case "regex":
            return regex_part(lark, value, param)
        case "choice":
            return choice_part(lark, value, param)
        case "grammar":
            return grammar_part(lark, value, param)
        case "structural_tag":
            return structural_tag(lark, format, totals)
