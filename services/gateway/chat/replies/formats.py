"""The reply formats of the two endpoints."""

from typing import Protocol

from msgspec import UNSET, Raw, Struct, UnsetType

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


class Output(Struct):
    """The fields of choice ``index`` in one object of a reply, apart from its text."""

    index: int
    logprobs: Raw | None
    finished: Finished | None
    finish_reason: str | None
    token_ids: TokenIds
    prompt: ShownPrompt
    draft_logprobs: Raw | UnsetType
    prompt_logprobs: Raw | UnsetType = UNSET

    @property
    def stop_reason(self) -> StopReason:
        return self.finished.stop_reason if self.finished is not None else UNSET


class Format(Protocol):
    """``prompt_on_top``: a reply has one prompt; its fields are next to the choices, not in
    them."""

    object: str
    chunk_object: str
    prompt_on_top: bool

    def opening(self, index: int, content: str | None = "") -> Choice | None:
        """The choice of a chunk before the first text, if there is one; ``content`` None: the first
        output is no content."""

    def chunk(self, output: Output, delta: ChatDelta) -> Choice: ...

    def whole(self, output: Output, message: ChatMessage) -> Choice: ...

    def logprobs(self, spelling: Spelling, echo: EchoedPrompt | None) -> LogprobWriter: ...


class ChatFormat:
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_on_top = True

    def opening(self, index: int, content: str | None = "") -> Choice | None:
        return ChunkChoice(index, ChatDelta(role="assistant", content=content))

    def chunk(self, output: Output, delta: ChatDelta) -> Choice:
        return ChunkChoice(
            index=output.index,
            delta=delta,
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids,
            draft_logprobs=output.draft_logprobs,
        )

    def whole(self, output: Output, message: ChatMessage) -> Choice:
        return ChatChoice(
            index=output.index,
            message=message,
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

    def chunk(self, output: Output, delta: ChatDelta) -> Choice:
        return self._choice(output, delta.content)

    def whole(self, output: Output, message: ChatMessage) -> Choice:
        return self._choice(output, message.content)

    def logprobs(self, spelling: Spelling, echo: EchoedPrompt | None) -> LogprobWriter:
        return TextLogprobs(spelling, echo)

    def _choice(self, output: Output, text: str | None) -> Choice:
        return TextChoice(
            index=output.index,
            text=text or "",
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids,
            prompt_token_ids=output.prompt.token_ids,
            draft_logprobs=output.draft_logprobs,
            prompt_logprobs=output.prompt_logprobs,
            token_offsets=output.prompt.offsets,
        )
