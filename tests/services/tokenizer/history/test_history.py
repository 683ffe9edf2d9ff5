"""Chats beyond their length limit, as the embedded model reads them."""

from itertools import pairwise
from math import log2

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.chat.fitted import FittedChat
from services.tokenizer.chat.normalize import Message
from services.tokenizer.history.fit import fit
from services.tokenizer.observer import Measure
from services.tokenizer.prepare import convert, encode
from services.tokenizer.text_model import TextModel
from shared.errors import InvalidRequest
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.codec import Array
from shared.wire.messages import NOTHING_DROPPED, ChatOptions, Convert, Dropped
from tests.services.tokenizer.chat.samples import TOOLS, options

SYSTEM = {"role": "system", "content": "Answer in one sentence."}
CALL = {"id": "c", "type": "function", "function": {"name": "multiply", "arguments": "{}"}}


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel(EMBEDDED_MODEL, 4096, 8192)


def asking(number: int, num_words: int = 5) -> Message:
    return {"role": "user", "content": f"Question {number}: " + "how many fish? " * num_words}


def turn(number: int, num_words: int = 5) -> list[Message]:
    """Every third one calls a tool."""
    asked = asking(number, num_words)
    answered = {"role": "assistant", "content": f"Answer {number}: as many as there are."}
    if number % 3:
        return [asked, answered]
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    return [asked, called, {"role": "tool", "tool_call_id": "c", "content": "7"}, answered]


def chat_of(num_turns: int, num_words: int = 5) -> list[Message]:
    past = [message for number in range(num_turns - 1) for message in turn(number, num_words)]
    return [SYSTEM, *past, asking(num_turns - 1, num_words)]


class Counting:
    """Encodes chats by ``model``, and counts the calls."""

    def __init__(self, model: TextModel, options: ChatOptions) -> None:
        self.num = 0
        self._model = model
        self._options = options

    def __call__(self, messages: list[Message], measure: Measure) -> Array:
        self.num += 1
        return self._model.encode_chat(messages, self._options, measure=measure)


def fitted(model: TextModel, messages: list[Message], limit: int) -> FittedChat:
    return fit(messages, limit, Counting(model, options(tools=TOOLS)))


def test_a_chat_that_fits_stays_whole(model: TextModel):
    chat = chat_of(4)
    num = len(fitted(model, chat, 0).ids)
    encoding = Counting(model, options(tools=TOOLS))
    for limit in (0, num, num + 1):
        found = fit(chat, limit, encoding)
        assert (found.messages, len(found.ids), found.dropped) == (chat, num, NOTHING_DROPPED)
    assert encoding.num == 3


def test_the_oldest_turns_go_and_the_report_of_them_is_true(model: TextModel):
    chat = chat_of(12)
    num = len(fitted(model, chat, 0).ids)
    for limit in range(num // 2, num, 7):
        found = fitted(model, chat, limit)
        assert len(found.ids) <= limit
        num_dropped = found.dropped.num_turns
        dropped = [message for number in range(num_dropped) for message in turn(number)]
        assert [SYSTEM, *dropped, *found.messages[1:]] == chat
        assert found.dropped.num_tokens == num - len(found.ids)
        assert fitted(model, found.messages, 0).ids.tolist() == found.ids.tolist()


def test_prompts_begin_alike_until_the_chat_has_grown_by_a_step(model: TextModel):
    """A turn is about a twelfth of the limit."""
    limit = 700
    prompts = [fitted(model, chat_of(num_turns), limit) for num_turns in range(1, 60)]
    assert all(len(each.ids) <= limit for each in prompts)
    nums = [each.dropped.num_turns for each in prompts]
    assert nums == sorted(nums)
    num_cuts = len(set(nums)) - 1
    assert nums[-1] > 40
    assert num_cuts <= nums[-1] / 2
    for before, after in pairwise(prompts):
        if before.dropped.num_turns == after.dropped.num_turns:
            asked = len(before.messages)
            assert after.messages[:asked] == before.messages


def test_a_long_history_is_encoded_a_few_times(model: TextModel):
    chat = chat_of(200)
    encoding = Counting(model, ChatOptions())
    found = fit(chat, 300, encoding)
    assert found.dropped.num_turns > 150
    assert encoding.num <= 2 + log2(200)


def test_a_last_turn_that_is_too_long_is_refused(model: TextModel):
    longer = [*chat_of(5)[:-1], asking(5, 200)]
    for which, chat in (("the only turn", chat_of(1, 200)), ("the last one", longer)):
        with pytest.raises(InvalidRequest, match=rf"{which} has \d+ tokens.*limit is 300") as error:
            fitted(model, chat, 300)
        assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(150, 1200))
def test_of_turns_of_any_size_the_last_always_stays(model: TextModel, sizes: list[int], limit: int):
    past = [each for number, size in enumerate(sizes) for each in turn(number, size)]
    chat = [SYSTEM, *past, asking(99)]
    found = fit(chat, limit, Counting(model, ChatOptions()))
    assert len(found.ids) <= limit
    assert (found.messages[0], found.messages[-1]) == (SYSTEM, asking(99))
    next_chat = [*chat, {"role": "assistant", "content": "Few."}, asking(100)]
    after = fit(next_chat, limit, Counting(model, ChatOptions()))
    assert after.dropped.num_turns >= found.dropped.num_turns


def test_text_and_places_of_a_prompt_match_the_remaining_turns(model: TextModel):
    chat = chat_of(12)
    data = np.frombuffer(msgspec.json.encode(chat), np.uint8)
    cut = ChatOptions(history_limit=200)
    ids, dropped, *_ = encode(model, "chat", data, False, cut)
    assert isinstance(dropped, Dropped)
    assert dropped.num_turns > 5
    assert convert(model, Convert("c", "chat", False, cut), data).tolist() == ids.tolist()
    text = convert(model, Convert("c", "chat", False, cut, "text"), data).tobytes().decode()
    assert model.encode(text, False).tolist() == ids.tolist()
    offsets = convert(model, Convert("c", "chat", False, cut, "offsets"), data)
    assert offsets.tolist()[-1] == len(text)
