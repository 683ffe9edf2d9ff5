"""A Submit as the scheduler and the decoding of its choices need it; runs on a thread. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np

from services.tokenizer.chat.fitted import FittedChat, whole
from services.tokenizer.chat.normalize import Message
from services.tokenizer.detokenize import NO_SEAM, Seam
from services.tokenizer.history.fit import fit
from services.tokenizer.media_reader import NO_MEDIA, PromptMedia, check_media, media_of
from services.tokenizer.observer import Measure, unmeasured
from services.tokenizer.open_choice import OpenChoice
from services.tokenizer.pairs.encode import encode_pair
from services.tokenizer.text_model import NO_OPTIONS, TextModel, Truncation, truncation_of
from services.tokenizer.text_stream import TextStream
from shared.errors import InvalidRequest
from shared.text import long_json
from shared.wire.codec import Array
from shared.wire.messages import (
    NOTHING_DROPPED,
    ChatOptions,
    Convert,
    Dropped,
    Item,
    OutputStart,
    PromptKind,
    SamplingParams,
    Submit,
)

FITS = (
    fit,
    whole,
)
"""The first one fits a chat into its limit."""


def refuse_pair(
    model: TextModel, prompt: Array, adds_special_tokens: bool, truncation: Truncation | None
) -> tuple[Array, int]:
    raise InvalidRequest("this installation encodes no pairs of texts", param="prompt")


ENCODE_PAIR = (
    encode_pair,
    refuse_pair,
)
"""The first one encodes a query and a document. It also counts the last ids of the second type."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """``ids`` [prompt_len] int32 of the prompt; ``params`` with the tokenizer's own values added;
    ``resumed`` [n] int32: the ids that an earlier attempt had emitted for all ``choices``;
    ``start``: the part of the output that each first token belongs to; ``dropped``: the part of
    the chat that the prompt leaves out; ``items``: the images of the prompt, ``media``: their
    numbers in the Submit, ``pixels``: of each different one."""

    ids: Array
    params: SamplingParams
    resumed: Array
    choices: list[OpenChoice]
    start: OutputStart
    dropped: Dropped
    items: list[Item] = field(default_factory=list)
    media: list[int] = field(default_factory=list)
    pixels: list[Array] = field(default_factory=list)


class EncodedPrompt(NamedTuple):
    """``ids`` [prompt_len] int32, at least one, the part of a chat that they leave out, the numbers
    of the media in them, and the number of last ids that are of the second text of a pair."""

    ids: Array
    dropped: Dropped = NOTHING_DROPPED
    media: Sequence[int] = ()
    num_second: int = 0


def prepare(
    model: TextModel,
    submit: Submit,
    prompt: Array,
    resumed: Array,
    max_tokens: int | None,
    measure: Measure = unmeasured,
    media: PromptMedia = NO_MEDIA,
) -> Prepared:
    """``resumed`` holds the ids of all choices, one after the other; ``max_tokens`` applies if the
    client sets no bound, as far as the context goes. Raises InvalidRequest."""
    _check_choices(model, submit, resumed)
    adds_special_tokens, truncation = submit.text.adds_special_tokens, truncation_of(submit.text)
    ids, dropped, numbers, num_second = encode(
        model, submit.kind, prompt, adds_special_tokens, submit.chat, truncation, measure, media
    )
    items = media.find_items(ids, numbers)
    media.check_room(items, len(ids), submit.params.max_tokens)
    return Prepared(
        ids=ids,
        params=_params(model, submit, len(ids), num_second, max_tokens),
        resumed=resumed,
        choices=_choices(model, submit, ids, resumed),
        # A chat that is submitted again comes as ids, with its options.
        start=model.output_start(ids, submit.chat),
        dropped=dropped,
        items=items,
        media=list(numbers),
        pixels=media.pixels_of(items),
    )


def _check_choices(model: TextModel, submit: Submit, resumed: Array) -> None:
    """Raises InvalidRequest for choices that a gateway of ours never sends."""
    num_ids = sum(start.num_ids for start in submit.choices)
    if num_ids != len(resumed):
        raise InvalidRequest(f"the choices count {num_ids} ids, and {len(resumed)} came")
    if len({start.choice for start in submit.choices}) != len(submit.choices):
        raise InvalidRequest("a choice is there twice")
    model.check_ids(resumed)


def _params(
    model: TextModel, submit: Submit, num_ids: int, num_second: int, max_tokens: int | None
) -> SamplingParams:
    params = submit.params
    if num_second and params.pooling is not None:
        pooling = msgspec.structs.replace(params.pooling, num_second=num_second)
        params = msgspec.structs.replace(params, pooling=pooling)
    if submit.text.bad_words:
        bad_words = [*params.bad_words, *model.encode_words(submit.text.bad_words)]
        params = msgspec.structs.replace(params, bad_words=bad_words)
    room = max(1, model.max_model_len - num_ids)
    if params.max_tokens is None:
        return _bounded(params, room, max_tokens)
    if submit.text.fits_max_tokens:
        return msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))
    return params


def _choices(model: TextModel, submit: Submit, ids: Array, resumed: Array) -> list[OpenChoice]:
    is_continued = submit.chat is None or submit.chat.continues_final_message
    seam = model.seam(ids) if is_continued else NO_SEAM
    ends = accumulate(start.num_ids for start in submit.choices)
    return [
        OpenChoice(
            index=start.choice,
            stream=_stream(model, submit, seam),
            resumed=resumed[end - start.num_ids : end].tolist(),
            num_chars=start.num_chars,
            num_prompt_scored=start.num_prompt_scored,
            num_marks=start.num_marks,
        )
        for start, end in zip(submit.choices, ends, strict=True)
    ]


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
    media: PromptMedia = NO_MEDIA,
) -> EncodedPrompt:
    """Raises InvalidRequest."""
    _check_dtype(kind, prompt)
    if media.num:
        _check_takes_media(kind, truncation)
    dropped, numbers, num_second = NOTHING_DROPPED, list(range(media.num)), 0
    match kind:
        case "ids":
            ids = truncation.cut(prompt) if truncation is not None else prompt
        case "text":
            with measure("encode"):
                ids = model.encode(_text(prompt), adds_special_tokens, truncation)
        case "chat":
            options = chat or NO_OPTIONS
            fitted = _fit(model, prompt, options, adds_special_tokens, truncation, measure, media)
            ids, dropped, numbers = fitted.ids, fitted.dropped, media_of(fitted.messages)
        case "pair":
            with measure("encode"):
                ids, num_second = ENCODE_PAIR[0](model, prompt, adds_special_tokens, truncation)
    if len(ids) == 0:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    model.check_ids(ids)
    return EncodedPrompt(ids, dropped, numbers, num_second)


def _check_takes_media(kind: PromptKind, truncation: Truncation | None) -> None:
    if kind not in ("chat", "ids"):
        raise InvalidRequest(f"a prompt of kind {kind} has no images", param="prompt")
    if truncation is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens: a prompt with images is not cut",
            param="truncate_prompt_tokens",
        )


def _fit(
    model: TextModel,
    prompt: Array,
    options: ChatOptions,
    adds_special_tokens: bool,
    truncation: Truncation | None,
    measure: Measure = unmeasured,
    media: PromptMedia = NO_MEDIA,
) -> FittedChat:
    def encode_messages(messages: list[Message], measure: Measure) -> Array:
        numbers = media_of(messages)
        how = adds_special_tokens, truncation, measure, lambda text: media.written(text, numbers)
        return media.expand(model.encode_chat(messages, options, *how), numbers)

    messages = _chat_messages(prompt, media.num)
    media.check_texts(messages, options)
    return FITS[0](
        messages,
        options.history_limit,
        encode_messages,
        measure,
        lambda message: sum(map(media.num_tokens, media_of([message]))),
    )


def convert(
    model: TextModel, message: Convert, data: Array, media: PromptMedia = NO_MEDIA
) -> Array:
    """The buffer of a Converted. Raises InvalidRequest."""
    truncation, adds_special_tokens = truncation_of(message), message.adds_special_tokens
    to = "text" if message.kind == message.to == "ids" else message.to  # as older gateways ask
    if to == "tokenizer":
        return np.frombuffer(msgspec.json.encode(model.description), np.uint8)
    if to == "ids":
        kind, chat = message.kind, message.chat
        ids, _, numbers, _ = encode(
            model, kind, data, adds_special_tokens, chat, truncation, media=media
        )
        media.find_items(ids, numbers)
        return ids
    text = _text_of(model, message, data, media)
    if to == "text":
        return np.frombuffer(text.encode(), np.uint8)
    if media.num:
        raise InvalidRequest("the tokens of images are at no place in a text", param="prompt")
    if message.kind == "ids":
        raise InvalidRequest("ids are at no place in a text", param="prompt")
    return model.offsets(text, adds_special_tokens, truncation)


def _text_of(model: TextModel, message: Convert, data: Array, media: PromptMedia) -> str:
    """A prompt as the text that is encoded, with one placeholder for each image."""
    _check_dtype(message.kind, data)
    match message.kind:
        case "ids":
            model.check_ids(data)
            return model.decode_many(data.tolist())
        case "text":
            return _text(data)
        case "chat":
            messages = _messages_left(model, message, data, media)
            text = model.render(messages, message.chat or NO_OPTIONS)
            return media.written(text, media_of(messages))
        case "pair":
            raise InvalidRequest("a pair is no text", param="prompt")


def _messages_left(
    model: TextModel, message: Convert, data: Array, media: PromptMedia
) -> list[Message]:
    """The messages of a chat that are in its prompt."""
    options = message.chat
    if options is None or not options.history_limit:
        return _chat_messages(data, media.num)
    adds_special_tokens = message.adds_special_tokens
    return _fit(model, data, options, adds_special_tokens, None, media=media).messages


def _text(prompt: Array) -> str:
    try:
        return prompt.tobytes().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the prompt is no text: {error}", param="prompt") from None


def _chat_messages(prompt: Array, num_media: int) -> list[Message]:
    messages = chat_messages(prompt)
    check_media(messages, num_media)
    return messages


def chat_messages(prompt: Array) -> list[Message]:
    """The messages of a prompt of kind ``chat``. Raises InvalidRequest."""
    try:
        return msgspec.convert(long_json.decode(prompt.data), list[dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"messages are no chat: {error}", param="messages") from None


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
