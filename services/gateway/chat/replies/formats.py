"""How each of the two endpoints words its replies."""

from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, Raw, UnsetType

from services.gateway.chat.replies.logprob_json import (
    ChatLogprobs,
    EchoedPrompt,
    LogprobWriter,
    TextLogprobs,
)
from services.gateway.chat.replies.openai import (
    ChatChoice,
    ChatDelta,
    ChatMessage,
    Choice,
    ChunkChoice,
    ShownPrompt,
    StopReason,
    TextChoice,
    TokenIds,
)
from services.gateway.mesh.token_table import Spelling
from shared.wire.messages import Finished


@dataclass(frozen=True, slots=True)
class Output:
    """What one object of a reply holds of choice ``index``: ``text``, or a ``delta`` or ``message``
    that was made of it."""

    index: int
    text: str
    logprobs: Raw | None
    finished: Finished | None
    finish_reason: str | None
    token_ids: TokenIds
    prompt: ShownPrompt
    draft_logprobs: Raw | UnsetType
    prompt_logprobs: Raw | UnsetType = UNSET
    delta: ChatDelta | None = None
    message: ChatMessage | None = None

    @property
    def stop_reason(self) -> StopReason:
        return self.finished.stop_reason if self.finished is not None else UNSET


class Format(Protocol):
    """``prompt_on_top``: a reply has one prompt, and what is shown of it stands beside its choices,
    not in them."""

    object: str
    chunk_object: str
    prompt_on_top: bool

    def opening(self, index: int, content: str | None = "") -> Choice | None:
        """The choice of a chunk before the first text, if there is one; ``content`` None: what
        comes first is no text."""

    def chunk(self, output: Output) -> Choice: ...

    def whole(self, output: Output) -> Choice: ...

    def logprobs(self, spelling: Spelling, echo: EchoedPrompt | None) -> LogprobWriter: ...


class ChatFormat:
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_on_top = True

    def opening(self, index: int, content: str | None = "") -> Choice | None:
        return ChunkChoice(index, ChatDelta(role="assistant", content=content))

    def chunk(self, output: Output) -> Choice:
        return ChunkChoice(
            index=output.index,
            delta=output.delta or ChatDelta(content=output.text or None),
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids,
            draft_logprobs=output.draft_logprobs,
        )

    def whole(self, output: Output) -> Choice:
        return ChatChoice(
            index=output.index,
            message=output.message or ChatMessage("assistant", output.text),
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids,
            draft_logprobs=output.draft_logprobs,
        )

    def logprobs(self, spelling: Spelling, echo: EchoedPrompt | None) -> LogprobWriter:
        return ChatLogprobs(spelling)


class TextFormat:
    object = chunk_object = "text_completion"
    prompt_on_top = False

    def opening(self, index: int, content: str | None = "") -> Choice | None:
        return None

    def chunk(self, output: Output) -> Choice:
        return TextChoice(
            index=output.index,
            text=output.text,
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids,
            prompt_token_ids=output.prompt.token_ids,
            draft_logprobs=output.draft_logprobs,
            prompt_logprobs=output.prompt_logprobs,
            token_offsets=output.prompt.offsets,
        )

    def whole(self, output: Output) -> Choice:
        return self.chunk(output)

    def logprobs(self, spelling: Spelling, echo: EchoedPrompt | None) -> LogprobWriter:
        return TextLogprobs(spelling, echo)
