"""The pieces of a streamed answer, for chats and completions."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

REASONING_FIELDS = ("reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of text; ``tokens`` are its tokens with their logprobs, if requested."""

    text: str
    is_reasoning: bool = False
    tokens: list[tuple[str, float]] = field(default_factory=list)


def chat_pieces(events: Iterable[Any]) -> Iterator[TextPiece]:
    for choice in _choices(events):
        delta = choice.get("delta") or {}
        reasoning = next((delta[name] for name in REASONING_FIELDS if delta.get(name)), "")
        content = (choice.get("logprobs") or {}).get("content") or []
        tokens = [(each["token"], each["logprob"]) for each in content]
        if reasoning:
            yield TextPiece(reasoning, is_reasoning=True)
        if text := delta.get("content") or "":
            yield TextPiece(text, tokens=tokens)


def text_pieces(events: Iterable[Any]) -> Iterator[TextPiece]:
    for choice in _choices(events):
        logprobs = choice.get("logprobs") or {}
        pairs = zip(
            logprobs.get("tokens") or [], logprobs.get("token_logprobs") or [], strict=False
        )
        if text := choice.get("text") or "":
            yield TextPiece(text, tokens=[(token, value or 0.0) for token, value in pairs])


def _choices(events: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for event in events:
        yield from event.get("choices") or []
