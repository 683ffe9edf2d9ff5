"""A Submit as the scheduler and the decoding of its choices need it; runs on a thread. Pure."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from services.tokenizer.chat.history import FittedChat, fit
from services.tokenizer.detokenize import NO_SEAM, Seam
from services.tokenizer.observer import Measure, unmeasured
from services.tokenizer.open_choice import OpenChoice
from services.tokenizer.text_model import NO_OPTIONS, TextModel
from services.tokenizer.text_stream import TextStream
from services.tokenizer.truncation import Truncation, truncation_of
from shared.errors import InvalidRequest
from shared.text import long_json
from shared.wire.codec import Array
from shared.wire.messages import (
    NOTHING_DROPPED,
    ChatOptions,
    Convert,
    Dropped,
    OutputStart,
    PromptKind,
    SamplingParams,
    Submit,
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """``ids`` [prompt_len] int32 of the prompt; ``params`` with the tokenizer's own values added;
    ``resumed`` [n] int32: the ids that an earlier attempt had emitted for all ``choices``;
    ``start``: the part of the output that each first token belongs to; ``dropped``: the part of
    the chat that the prompt leaves out."""

    ids: Array
    params: SamplingParams
    resumed: Array
    choices: list[OpenChoice]
    start: OutputStart
    dropped: Dropped


class EncodedPrompt(NamedTuple):
    """``ids`` [prompt_len] int32, at least one, and the part of a chat that they leave out."""

    ids: Array
    dropped: Dropped = NOTHING_DROPPED


def prepare(
    model: TextModel,
    submit: Submit,
    prompt: Array,
    resumed: Array,
    max_tokens: int | None,
    measure: Measure = unmeasured,
) -> Prepared:
    """``resumed`` holds the ids of all choices, one after the other; ``max_tokens`` applies if the
    client sets no bound, as far as the context goes. Raises InvalidRequest."""
    _check_choices(model, submit, resumed)
    adds_special_tokens, truncation = submit.text.adds_special_tokens, truncation_of(submit.text)
    ids, dropped = encode(
        model, submit.kind, prompt, adds_special_tokens, submit.chat, truncation, measure
    )
    # A chat that is submitted again comes as ids, with its options.
    output_start = model.output_start(ids, submit.chat)
    params = submit.params
    if submit.text.bad_words:
        bad_words = [*params.bad_words, *model.encode_words(submit.text.bad_words)]
        params = msgspec.structs.replace(params, bad_words=bad_words)
    room = max(1, model.max_model_len - len(ids))
    if params.max_tokens is None:
        params = _bounded(params, room, max_tokens)
    elif submit.text.fits_max_tokens:
        params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))
    seam = NO_SEAM
    if submit.chat is None or submit.chat.continues_final_message:
        seam = model.seam(ids)
    choices = []
    end = 0
    for start in submit.choices:
        begin, end = end, end + start.num_ids
        stream, so_far = _stream(model, submit, seam), resumed[begin:end].tolist()
        choices.append(
            OpenChoice(
                index=start.choice,
                stream=stream,
                resumed=so_far,
                num_chars=start.num_chars,
                num_prompt_scored=start.num_prompt_scored,
                num_marks=start.num_marks,
            )
        )
    return Prepared(
        ids=ids,
        params=params,
        resumed=resumed,
        choices=choices,
        start=output_start,
        dropped=dropped,
    )


def _check_choices(model: TextModel, submit: Submit, resumed: Array) -> None:
    """Raises InvalidRequest for choices that a gateway of ours never sends."""
    num_ids = sum(start.num_ids for start in submit.choices)
    if num_ids != len(resumed):
        raise InvalidRequest(f"the choices count {num_ids} ids, and {len(resumed)} came")
    if len({start.choice for start in submit.choices}) != len(submit.choices):
        raise InvalidRequest("a choice is there twice")
    model.check_ids(resumed)


def _bounded(params: SamplingParams, room: int, max_tokens: int | None) -> SamplingParams:
    """Adds the default bound if the client sets none. Raises InvalidRequest."""
    bound = room if max_tokens is None else min(max_tokens, room)
    if params.min_tokens > bound:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}; without max_tokens this text has at most {bound}",
            param="min_tokens",
        )
    if max_tokens is None:
        return params
    return msgspec.structs.replace(params, max_tokens=bound)


def encode(
    model: TextModel,
    kind: PromptKind,
    prompt: Array,
    adds_special_tokens: bool,
    chat: ChatOptions | None = None,
    truncation: Truncation | None = None,
    measure: Measure = unmeasured,
) -> EncodedPrompt:
    """Raises InvalidRequest."""
    _check_dtype(kind, prompt)
    dropped = NOTHING_DROPPED
    match kind:
        case "ids":
            ids = truncation.cut(prompt) if truncation is not None else prompt
        case "text":
            with measure("encode"):
                ids = model.encode(_text(prompt), adds_special_tokens, truncation)
        case "chat":
            options = chat or NO_OPTIONS
            fitted = _fit(model, prompt, options, adds_special_tokens, truncation, measure)
            ids, dropped = fitted.ids, fitted.dropped
        case "pair":
            with measure("encode"):
                ids = model.encode_pair(_pair(prompt), adds_special_tokens, truncation)
    if len(ids) == 0:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    model.check_ids(ids)
    return EncodedPrompt(ids, dropped)


def _fit(
    model: TextModel,
    prompt: Array,
    options: ChatOptions,
    adds_special_tokens: bool,
    truncation: Truncation | None,
    measure: Measure = unmeasured,
) -> FittedChat:
    return fit(
        chat_messages(prompt),
        options.history_limit,
        lambda messages, measure: model.encode_chat(
            messages, options, adds_special_tokens, truncation, measure
        ),
        measure,
    )


def convert(model: TextModel, message: Convert, data: Array) -> Array:
    """The buffer of a Converted. Raises InvalidRequest."""
    truncation, adds_special_tokens = truncation_of(message), message.adds_special_tokens
    to = "text" if message.kind == message.to == "ids" else message.to  # as older gateways ask
    if to == "tokenizer":
        return np.frombuffer(msgspec.json.encode(model.description), np.uint8)
    if to == "ids":
        kind, chat = message.kind, message.chat
        return encode(model, kind, data, adds_special_tokens, chat, truncation).ids
    text = _text_of(model, message, data)
    if to == "text":
        return np.frombuffer(text.encode(), np.uint8)
    if message.kind == "ids":
        raise InvalidRequest("ids are at no place in a text", param="prompt")
    return model.offsets(text, adds_special_tokens, truncation)


def _text_of(model: TextModel, message: Convert, data: Array) -> str:
    """A prompt as the text that is encoded."""
    _check_dtype(message.kind, data)
    match message.kind:
        case "ids":
            model.check_ids(data)
            return model.decode_many(data.tolist())
        case "text":
            return _text(data)
        case "chat":
            options = message.chat or NO_OPTIONS
            return model.render(_messages_left(model, message, data), options)
        case "pair":
            raise InvalidRequest("a pair is no text", param="prompt")


def _messages_left(model: TextModel, message: Convert, data: Array) -> list[dict[str, Any]]:
    """The messages of a chat that are in its prompt."""
    options = message.chat
    if options is None or not options.history_limit:
        return chat_messages(data)
    return _fit(model, data, options, message.adds_special_tokens, None).messages


def _text(prompt: Array) -> str:
    try:
        return prompt.tobytes().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the prompt is no text: {error}", param="prompt") from None


def chat_messages(prompt: Array) -> list[dict[str, Any]]:
    """The messages of a prompt of kind ``chat``. Raises InvalidRequest."""
    try:
        return msgspec.convert(long_json.decode(prompt.data), list[dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"messages are no chat: {error}", param="messages") from None


def _pair(prompt: Array) -> list[str]:
    try:
        pair = msgspec.json.decode(prompt.tobytes(), type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the prompt is no pair: {error}", param="prompt") from None
    if not 2 <= len(pair) <= 3:
        raise InvalidRequest(f"a pair has {len(pair)} texts; expected 2 or 3", param="prompt")
    return pair


def _check_dtype(kind: PromptKind, prompt: Array) -> None:
    if (kind == "ids") != (prompt.dtype == np.int32):
        raise InvalidRequest(f"a prompt of kind {kind} came as {prompt.dtype}", param="prompt")


def _stream(model: TextModel, submit: Submit, seam: Seam) -> TextStream:
    text = submit.text
    return TextStream(
        decode=lambda ids: model.decode(ids, text.skips_special_tokens),
        stops=text.stop,
        includes_stop=text.includes_stop,
        min_tokens=submit.params.min_tokens,
        added=model.added_texts(text.skips_special_tokens) if text.has_marks else None,
        partial_ids=model.partial_ids,
        seam=seam,
    )
