"""From a Submit to the scheduler."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from services.tokenizer.prepare import Prepared, convert, prepare
from services.tokenizer.text_model import TextModel
from shared.errors import InvalidRequest
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import (
    ChatOptions,
    ChoiceStart,
    Convert,
    SamplingParams,
    Submit,
    TextOptions,
)

NO_IDS = np.zeros(0, np.int32)


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel(EMBEDDED_MODEL, 100, 8192)


def prepared(
    model: TextModel,
    ids: list[int],
    max_tokens: int | None = None,
    resumed: tuple[int, ...] = (),
    **changes,
) -> Prepared:
    submit = Submit("r", 1, "ids", SamplingParams(seed=0), TextOptions(), [ChoiceStart(0)])
    submit = msgspec.structs.replace(submit, **changes)
    return prepare(model, submit, np.array(ids, np.int32), np.array(resumed, np.int32), max_tokens)


@pytest.fixture
def llama(tmp_path: Path, byte_fallback_tokenizer: Tokenizer) -> TextModel:
    """With Llama 2's decoder, which strips a blank at the beginning of a text."""
    byte_fallback_tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TextModel(tmp_path, 100, byte_fallback_tokenizer.get_vocab_size())


CONTINUED = ChatOptions(adds_generation_prompt=False, continues_final_message=True)


@pytest.mark.parametrize(
    ("chat", "text"), [(None, " ab"), (CONTINUED, " ab"), (ChatOptions(), "ab")]
)
def test_a_text_goes_on_from_its_prompt(llama: TextModel, chat: ChatOptions | None, text: str):
    """A chat's reply is a separate text."""
    word = llama.encode_exactly("ab")
    [choice] = prepared(llama, llama.encode_exactly("b"), chat=chat).choices
    assert choice.push(word, False) == text
    again: dict[str, Any] = {"resumed": tuple(word), "choices": [ChoiceStart(0, len(word), 1)]}
    [choice] = prepared(llama, llama.encode_exactly("b"), chat=chat, **again).choices
    assert choice.push([], False) == text[1:]
    stop = TextOptions(stop=[" a"])
    [choice] = prepared(llama, llama.encode_exactly("b"), chat=chat, text=stop).choices
    assert choice.push(word, False) == ("" if text.startswith(" ") else "ab")


def test_a_text_ends_the_character_that_its_prompt_has_begun(model: TextModel):
    for start in ("", "so "):
        ids = model.encode_exactly(f"{start}🦀🪼")
        half = next(end for end in range(1, len(ids)) if "\ufffd" in model.decode(ids[:end]))
        [choice] = prepared(model, ids[:half]).choices
        assert choice.push(ids[half:], False) == "🦀🪼"


def test_bad_words_become_ids(model: TextModel):
    params = prepared(model, [5], text=TextOptions(bad_words=["shoal"])).params
    assert params.bad_words == model.encode_words(["shoal"])
    text, given = TextOptions(bad_words=["shoal"]), SamplingParams(seed=0, bad_words=[[7]])
    params = prepared(model, [5], params=given, text=text).params
    assert params.bad_words == [[7], *model.encode_words(["shoal"])]


@pytest.mark.parametrize(
    ("asked", "default", "expected"),
    [(None, 30, 30), (None, 99, 90), (7, 30, 7), (None, None, None)],
)
def test_the_models_bound_counts_where_the_client_sets_none(
    model: TextModel, asked: int | None, default: int | None, expected: int | None
):
    params = SamplingParams(seed=0, max_tokens=asked)
    assert prepared(model, [5] * 10, default, params=params).params.max_tokens == expected


@pytest.mark.parametrize(
    ("asked", "fits", "expected"),
    [(64_000, True, 90), (64_000, False, 64_000), (7, True, 7), (0, True, 0)],
)
def test_a_bound_may_count_as_far_as_the_context_goes(
    model: TextModel, asked: int, fits: bool, expected: int
):
    text = TextOptions(fits_max_tokens=fits)
    params = SamplingParams(seed=0, max_tokens=asked)
    found = prepared(model, [5] * 10, 30, params=params, text=text).params
    assert found.max_tokens == expected


@pytest.mark.parametrize(("min_tokens", "default"), [(91, None), (31, 30), (91, 99)])
def test_a_text_that_cannot_become_long_enough_is_refused(
    model: TextModel, min_tokens: int, default: int | None
):
    params = SamplingParams(seed=0, min_tokens=min_tokens - 1)
    assert prepared(model, [5] * 10, default, params=params)
    params = msgspec.structs.replace(params, min_tokens=min_tokens)
    with pytest.raises(InvalidRequest, match=f"min_tokens is {min_tokens}.*{min_tokens - 1}"):
        prepared(model, [5] * 10, default, params=params)


def test_each_choice_resumes_with_its_own_ids(model: TextModel):
    starts = [ChoiceStart(0, 2, 0), ChoiceStart(2, 0, 0), ChoiceStart(3, 1, 0)]
    done = prepared(model, [5], resumed=(7, 8, 9), choices=starts)
    assert [each.num_tokens for each in done.choices] == [2, 0, 1]
    assert done.resumed.tolist() == [7, 8, 9]


def test_a_choice_resumes_behind_the_marks_that_its_gateway_has(model: TextModel):
    end = model.added_ids["<|im_end|>"]
    resumed = (*model.encode("one", False), end, end)
    starts = [ChoiceStart(0, len(resumed), 3, num_marks=1)]
    text = TextOptions(has_marks=True)
    (choice,) = prepared(model, [5], resumed=resumed, choices=starts, text=text).choices
    assert choice.push([end], last_is_textless=False) == ""
    indexes = [mark.index for mark in choice.take_marks()]
    assert indexes == [len(resumed) - 1, len(resumed)]
    (plain,) = prepared(model, [5], resumed=resumed, choices=starts).choices
    assert plain.take_marks() == []


def test_a_chat_is_rendered_with_its_options(model: TextModel):
    message = {"role": "assistant", "content": "The answer is"}
    chat = ChatOptions(adds_generation_prompt=False, continues_final_message=True)
    messages = np.frombuffer(msgspec.json.encode([message]), np.uint8)
    submit = Submit(
        "r", 1, "chat", SamplingParams(seed=0), TextOptions(), [ChoiceStart(0)], chat=chat
    )
    for ids in (
        prepare(model, submit, messages, NO_IDS, None).ids,
        convert(model, Convert("c", "chat", False, chat), messages),
    ):
        assert model.decode_many(ids.tolist()).endswith("assistant\nThe answer is")


def test_a_chat_that_is_no_array_of_objects_is_refused(model: TextModel, subtests: pytest.Subtests):
    for chat in (b"[1]", b"{}", b"[", b'[{"a": "\xff"}]', b"[" * 100_000):
        with subtests.test(chat=chat[:20]), pytest.raises(InvalidRequest) as raised:
            convert(model, Convert("c", "chat", False), np.frombuffer(chat, np.uint8))
        assert raised.value.param == "messages"


@pytest.mark.parametrize("ids", [[], [8192], [-1]])
def test_a_prompt_without_tokens_or_with_unknown_ones_is_refused(model: TextModel, ids: list[int]):
    with pytest.raises(InvalidRequest):
        prepared(model, ids)


def test_a_text_converted_to_ids_and_back_is_the_text(model: TextModel):
    text = "def f(x): return 'Grüße' <|im_end|>"
    ids = convert(model, Convert("c", "text", True), np.frombuffer(text.encode(), np.uint8))
    assert convert(model, Convert("c", "ids", True, to="text"), ids).tobytes().decode() == text


@pytest.mark.parametrize("cut", [(None, False), (4, False), (4, True)])
def test_a_prompt_has_a_text_and_each_of_its_tokens_a_place_in_it(
    model: TextModel, cut: tuple[int | None, bool]
):
    messages = [{"role": "user", "content": "Grüße 🐟?"}]
    data = np.frombuffer(msgspec.json.encode(messages), np.uint8)
    asked = [Convert("c", "chat", False, None, to, *cut) for to in ("ids", "text", "offsets")]
    ids, text, offsets = (convert(model, each, data) for each in asked)
    rendered = text.tobytes().decode()
    assert rendered == model.render(messages)
    pairs = offsets.reshape(-1, 2).tolist()
    assert len(ids) == len(pairs) == (cut[0] or len(model.encode(rendered)))
    for token_id, (start, end) in zip(ids.tolist(), pairs, strict=True):
        written = model.decode([token_id], skips_special_tokens=False)
        assert rendered[start:end] == written or "\ufffd" in written
    with pytest.raises(InvalidRequest, match="no place"):
        convert(model, Convert("c", "ids", True, to="offsets"), ids)


def test_a_tokenizer_is_described_as_its_folder_does(model: TextModel):
    asked = Convert("c", "text", False, to="tokenizer")
    found = msgspec.json.decode(convert(model, asked, np.zeros(0, np.uint8)).tobytes())
    written = msgspec.json.decode((EMBEDDED_MODEL / "tokenizer_config.json").read_bytes())
    assert found == written | {
        "tokenizer_class": written.get("tokenizer_class", "PreTrainedTokenizerFast"),
        "chat_template": found["chat_template"],
    }
    assert "<|im_start|>" in found["chat_template"]
