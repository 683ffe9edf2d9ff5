"""Conversions of text to ids and of ids to text, done by tokenizers in addition to the prompts."""

import asyncio
from itertools import count

from services.gateway.mesh.job import Prompt
from services.gateway.mesh.tokenizers import Tokenizer, Tokenizers
from shared.errors import RETRY_AFTER_S, RequestError, Unavailable
from shared.wire.codec import Array
from shared.wire.messages import (
    CONVERTED_MINOR,
    Cancel,
    ChatOptions,
    Convert,
    Converted,
    ConvertedTo,
    Failed,
    RequestKey,
)


class Conversions:
    """Sends each conversion to one tokenizer and returns its answer."""

    def __init__(self, tokenizers: Tokenizers, accept_timeout_s: float) -> None:
        self._tokenizers = tokenizers
        self._accept_timeout_s = accept_timeout_s
        self._new_numbers = count()

    async def convert(
        self,
        owner: str,
        prompt: Prompt,
        adds_special_tokens: bool,
        chat: ChatOptions | None = None,
        to: ConvertedTo = "ids",
        max_prompt_tokens: int | None = None,
        keeps_prompt_start: bool = False,
    ) -> Array:
        """Returns for ``owner`` the ids of a prompt, [n] int32, the UTF-8 bytes of its text,
        [n] uint8, or where in it its tokens begin and end, [2 n] int64.

        Raises RequestError, Unavailable after ``accept_timeout_s``. Cancelling the call cancels the
        conversion.
        """
        name = f"convert-{next(self._new_numbers)}"
        message = Convert(
            request=name,
            kind=prompt.kind,
            adds_special_tokens=adds_special_tokens,
            chat=chat,
            to=to,
            max_prompt_tokens=max_prompt_tokens,
            keeps_prompt_start=keeps_prompt_start,
            owner=owner,
            media=[each.medium for each in prompt.media],
            media_options=prompt.media_options,
        )
        arrays = [prompt.data, *(each.data for each in prompt.media)]
        tokenizer = self._tokenizers.least_loaded(minor=prompt.minor)
        try:
            return await self._ask(tokenizer, message, arrays)
        except RequestError as error:
            other = self._tokenizers.other_for(tokenizer, error, minor=prompt.minor)
            if other is None:
                raise
            result = await self._ask(other, message, arrays)
            tokenizer.note_failure(error)
            return result

    async def _ask(self, tokenizer: Tokenizer, message: Convert, arrays: list[Array]) -> Array:
        _check_minor(tokenizer, message)
        name = message.request
        answer: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
        tokenizer.conversions[name] = answer
        try:
            tokenizer.peer.send(message, *arrays)
            async with asyncio.timeout(self._accept_timeout_s):
                return await answer
        except TimeoutError:
            text = f"not converted within {self._accept_timeout_s:g} s (accept-timeout-s)"
            raise Unavailable(text, retry_after_s=RETRY_AFTER_S) from None
        finally:
            if tokenizer.conversions.pop(name, None) and not _is_answered(answer):
                tokenizer.peer.send(Cancel([RequestKey(name, 0)]))

    def finish(self, tokenizer: Tokenizer, converted: Converted, result: Array) -> None:
        if answer := tokenizer.conversions.get(converted.request):
            tokenizer.probation.succeed()
            _end(answer, result)

    def fail(self, tokenizer: Tokenizer, failed: Failed) -> None:
        if answer := tokenizer.conversions.get(failed.request):
            _end(answer, RequestError.from_failed(failed))

    def fail_all(self, tokenizer: Tokenizer, error: RequestError) -> None:
        """Fails the open conversions of a lost tokenizer."""
        for answer in tokenizer.conversions.values():
            _end(answer, error)
        tokenizer.conversions.clear()


def _check_minor(tokenizer: Tokenizer, message: Convert) -> None:
    """Raises Unavailable if the tokenizer's protocol is too old for the conversion."""
    usual: ConvertedTo = "text" if message.kind == "ids" else "ids"
    is_usual = message.to == usual and message.max_prompt_tokens is None
    if not is_usual and tokenizer.peer.hello.minor < CONVERTED_MINOR:
        text = f"a tokenizer of protocol minor {CONVERTED_MINOR} is needed, and none is there"
        raise Unavailable(text, retry_after_s=RETRY_AFTER_S)


def _is_answered(answer: asyncio.Future[Array]) -> bool:
    return answer.done() and not answer.cancelled()


def _end(answer: asyncio.Future[Array], outcome: Array | RequestError) -> None:
    """Does nothing if the call was cancelled."""
    if answer.done():
        return
    if isinstance(outcome, RequestError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
