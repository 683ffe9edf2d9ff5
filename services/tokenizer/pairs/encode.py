"""A query and a document as one prompt, for a model that scores pairs."""

from collections.abc import Sequence

import msgspec
import numpy as np

from services.tokenizer.chat.bounded import TooMuchTime
from services.tokenizer.chat.template import TEMPLATE_ERRORS, ChatTemplate, TooMuchText
from services.tokenizer.text_model import TextModel, Truncation
from shared.errors import InvalidRequest
from shared.wire.codec import Array

NO_TEMPLATE = "instruction: the model has no template of pairs, so it reads none (chat-template)"
ROLES = ("query", "document", "system")  # the last one with an instruction, as in vLLM
HALF_CHARACTER = "\ufffd"  # written for the bytes of an incomplete character


def encode_pair(
    model: TextModel, prompt: Array, adds_special_tokens: bool, truncation: Truncation | None
) -> tuple[Array, int]:
    """Ids of a query and a document, and of an instruction if there is one, as the model's template
    writes them, or side by side: [n] int32. Under a template the document is cut. Also counts the
    last ids of the second type, which the tokenizer gives to the document."""
    pair = _read(prompt)
    query, document, *instruction = pair
    if (template := model.pair_template) is None:
        if instruction:
            raise InvalidRequest(NO_TEMPLATE, param="instruction")
        encoding = model.encoding((query, document), adds_special_tokens)
        columns = [encoding.ids, encoding.type_ids]
        if truncation is not None:
            columns = [truncation.cut_encoding(encoding, each) for each in columns]
        return np.array(columns[0], np.int32), sum(columns[1])
    ids = _written(model, template, pair)
    if truncation is None or len(ids) <= truncation.num_ids:
        return ids, 0
    words = model.encode(document, adds_special_tokens=False)
    num_left = len(words)
    while len(ids) > truncation.num_ids:
        num_left -= len(ids) - truncation.num_ids
        if num_left <= 0:
            raise model.too_long(f"has {len(ids)} with a document of {len(words)} tokens")
        kept = Truncation(num_left, truncation.keeps_start).cut(words)
        document = model.decode_many(kept.tolist()).strip(HALF_CHARACTER)
        ids = _written(model, template, (query, document, *instruction))
    return ids, 0


def _read(prompt: Array) -> list[str]:
    try:
        pair = msgspec.json.decode(prompt.tobytes(), type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the prompt is no pair: {error}", param="prompt") from None
    if not 2 <= len(pair) <= 3:
        raise InvalidRequest(f"a pair has {len(pair)} texts; expected 2 or 3", param="prompt")
    return pair


def _written(model: TextModel, template: ChatTemplate, pair: Sequence[str]) -> Array:
    """The template gets messages with the ``ROLES``."""
    texts = zip(ROLES, pair, strict=False)
    messages = [{"role": role, "content": text} for role, text in texts]
    variables = {**model.special_tokens, "messages": messages, "add_generation_prompt": True}
    try:
        text = template.render(variables, model.max_chars)
    except TooMuchText as error:
        raise model.too_long(f"has {error}") from None
    except (*TEMPLATE_ERRORS, TooMuchTime) as error:
        problem = f"the model's template of pairs refuses this one: {error}"
        raise InvalidRequest(problem, param="prompt") from None
    return model.encode(text, False)
