"""Truncation of prompts on request."""

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from services.tokenizer.prepare import encode
from services.tokenizer.text_model import TextModel, Truncation
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import PromptKind

TEXT = "The shoal turns as one, and no fish gives the order."
CHAT = b'[{"role": "user", "content": "How many fish?"}]'


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel(EMBEDDED_MODEL, 100, 8192)


@pytest.mark.parametrize("kind", ["ids", "text", "chat"])
def test_the_last_tokens_stay_or_the_first(model: TextModel, kind: PromptKind):
    ids = model.encode(TEXT)
    data = {
        "ids": ids,
        "text": np.frombuffer(TEXT.encode(), np.uint8),
        "chat": np.frombuffer(CHAT, np.uint8),
    }[kind]
    whole = encode(model, kind, data, False).ids.tolist()
    assert len(whole) > 5
    for num in (1, 5, len(whole), len(whole) + 1):
        last = encode(model, kind, data, False, None, Truncation(num)).ids
        first = encode(model, kind, data, False, None, Truncation(num, keeps_start=True)).ids
        assert last.tolist() == whole[-num:]
        assert first.tolist() == whole[:num]
        assert last.dtype == first.dtype == np.int32


def test_the_special_tokens_around_a_text_are_not_cut():
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    begin, end = (tokenizer.token_to_id(each) for each in ("<|im_start|>", "<|im_end|>"))
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", begin), ("<|im_end|>", end)],
    )
    text = tokenizer.encode(TEXT, add_special_tokens=False).ids
    encoding = tokenizer.encode(TEXT)
    assert Truncation(5).cut_encoding(encoding, encoding.ids) == [begin, *text[-3:], end]
    assert Truncation(5, keeps_start=True).cut_encoding(encoding, encoding.ids) == [
        begin,
        *text[:3],
        end,
    ]
    assert Truncation(2).cut_encoding(encoding, encoding.ids) == [begin, end]
    assert Truncation(1).cut_encoding(encoding, encoding.ids) == [begin]
    assert Truncation(len(text) + 2).cut_encoding(encoding, encoding.ids) == [begin, *text, end]
    empty = tokenizer.encode("")
    assert Truncation(5).cut_encoding(empty, empty.ids) == [begin, end]
