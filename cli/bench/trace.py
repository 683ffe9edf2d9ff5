"""A trace: recorded requests, one JSON object per line."""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from cli.bench.lengths import MAX_LENGTH
from shared.errors import ConfigError


class TraceLine(msgspec.Struct, frozen=True):
    """Either ``prompt`` or ``messages``; ``timestamp`` in seconds, from any origin."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)] | None = None
    timestamp: float | None = None

    def content(self, endpoint: str) -> dict[str, Any]:
        """The content of a line checked for ``endpoint``."""
        if endpoint == "completions":
            return {"prompt": self.prompt}
        if self.messages is not None:
            return {"messages": self.messages}
        return {"messages": [{"role": "user", "content": self.prompt}]}

    def check(self, endpoint: str, needs_timestamp: bool) -> None:
        """Raises ValueError."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs either prompt or messages")
        if endpoint == "completions" and self.prompt is None:
            raise ValueError("has messages, which go with --endpoint chat only")
        if endpoint == "chat" and isinstance(self.prompt, list):
            raise ValueError("has a prompt of ids, which goes with --endpoint completions only")
        if needs_timestamp and self.timestamp is None:
            raise ValueError("has no timestamp, which --replay needs")


def parse(text: bytes, endpoint: str, needs_timestamp: bool) -> list[TraceLine]:
    """The lines, sorted by time if needed. Raises ValueError with the number of the line."""
    decoder = msgspec.json.Decoder(TraceLine)
    lines = []
    for number, data in enumerate(text.splitlines(), 1):
        if data.strip():
            try:
                line = decoder.decode(data)
                line.check(endpoint, needs_timestamp)
            except ValueError as error:  # includes msgspec's errors
                raise ValueError(f"line {number}: {error}") from None
            lines.append(line)
    return sorted(lines, key=lambda line: line.timestamp or 0.0) if needs_timestamp else lines


def read(path: Path, endpoint: str, needs_timestamp: bool) -> list[TraceLine]:
    """Raises ConfigError."""
    try:
        lines = parse(path.read_bytes(), endpoint, needs_timestamp)
    except OSError as error:
        raise ConfigError(f"--trace: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--trace: {path}, {error}") from None
    if not lines:
        raise ConfigError(f"--trace: {path} has no line")
    return lines
