"""Limits on the cost of a grammar, equal where it is tried and where it is used.

They are llguidance's counters. A tokenizer's trial is also limited in time, so one tokenizer may
refuse a grammar that another has accepted.
"""

from typing import Any

PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 500,
    "step_max_items": 20_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 300_000,
    "verbose_errors": False,  # verbose ones quote the grammar and the text
}
COMPILE_STACK_BYTES = 256 << 20
"""Stack of the compiling thread: llguidance recurses as deep as rules nest."""
