"""A client's request as the mesh needs it."""

from dataclasses import dataclass
from typing import Literal

from shared.codec import Array
from shared.messages import SamplingParams

PromptKind = Literal["text", "ids", "chat"]


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and what to do with it. ``prompt`` is the buffer that travels with ``Submit``.

    ``model`` is the name the client used, one of those we serve.
    """

    model: str
    kind: PromptKind
    prompt: Array
    params: SamplingParams
    stop: list[str]
    is_stream: bool
    includes_usage: bool
