"""How much a grammar may cost: the same where it is tried and where it is used.

They are llguidance's, and counted. What a tokenizer tries is bounded in time as well, so that one
may refuse a grammar that another has taken.
"""

from typing import Any

PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 500,
    "step_max_items": 20_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 300_000,
    "verbose_errors": False,  # others quote the grammar and the text
}
COMPILE_STACK_BYTES = 256 << 20
"""Of the thread that compiles: llguidance recurses as deep as rules name one another."""
