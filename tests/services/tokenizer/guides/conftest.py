"""A real vocabulary with the markers of several families, and a grammar's verdict on texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from services.tokenizer.guides.compose import Dialect
from shared.dialects.known import KNOWN
from shared.guides.limits import PARSER_LIMITS
from shared.model_folder import EMBEDDED_MODEL, TOKENIZER_FILE

END_IDS = [2, 0]


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer
    matching: LLTokenizer

    @property
    def added(self) -> Mapping[str, int]:
        return {
            each.content: token for token, each in self.tokenizer.get_added_tokens_decoder().items()
        }

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def dialect(self, tools: str = "", reasoning: str = "") -> Dialect:
        return Dialect(
            self.added,
            self.encode,
            KNOWN.tools.get(tools),
            KNOWN.reasoning.get(reasoning),
        )

    def refusal(self, grammar: str, text: str) -> str | None:
        """None if the grammar accepts the whole text; otherwise the rest from the failure on."""
        matcher = compiled(self.matching, grammar).deep_copy()
        ids = self.encode(text)
        num = matcher.try_consume_tokens(ids)
        assert not matcher.is_error(), matcher.get_error()
        if num < len(ids):
            return self.tokenizer.decode(ids[num:], skip_special_tokens=False)
        return None if matcher.is_accepting() else ""


@cache
def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    limits = LLParserLimits(**PARSER_LIMITS)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


@cache
def vocabulary_with(*markers: str) -> Vocabulary:
    """The embedded model's vocabulary, with added tokens."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / TOKENIZER_FILE))
    tokenizer.add_tokens([AddedToken(each, special=False) for each in markers])
    size = tokenizer.get_vocab_size()
    return Vocabulary(tokenizer, LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=END_IDS))


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """Without markers."""
    return vocabulary_with()
