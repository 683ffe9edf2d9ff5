"""The marks of added tokens are at the tokens, for any cut of ids and messages."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.tokenizer.detokenize import partial_ids, token_bytes
from services.tokenizer.open_choice import OpenChoice
from services.tokenizer.text_stream import TextStream
from shared.wire.messages import Mark
from tests.services.tokenizer.conftest import SAMPLE, byte_level_tokenizer

SHOWN, HIDDEN = ("<think>", "</think>", "<tool_call>"), ("<|end|>", "<｜call｜>")


class Vocabulary:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.tokenizer.add_tokens(list(SHOWN))
        self.tokenizer.add_special_tokens(list(HIDDEN))
        self.size = self.tokenizer.get_vocab_size()
        self.ids = {text: self.tokenizer.token_to_id(text) for text in (*SHOWN, *HIDDEN)}
        self.added = {token_id: shown(text) for text, token_id in self.ids.items()}
        self.partial_ids = frozenset(partial_ids(token_bytes(self.tokenizer, self.size)))


def shown(text: str) -> str:
    return "" if text in HIDDEN else text


BYTE_LEVEL = Vocabulary(byte_level_tokenizer([SAMPLE], 300))
TOKENIZER, IDS = BYTE_LEVEL.tokenizer, BYTE_LEVEL.ids
CUTS = st.lists(st.integers(0, 1000), max_size=8)
TEXTS = st.text(st.sampled_from("ab <世é👩"), max_size=8)
PIECES = st.lists(st.one_of(st.sampled_from([*SHOWN, *HIDDEN]), TEXTS), max_size=12)
NUMBERS = st.lists(st.integers(0, 400), max_size=120)
STOPS = st.sampled_from([[], ["e"], ["</think>"], ["hink>"], ["fox j", "><"]])


class Client:
    """Receives a choice's messages, over several attempts, and checks each piece."""

    def __init__(self, stops: Sequence[str] = (), vocabulary: Vocabulary = BYTE_LEVEL) -> None:
        self.stops = stops
        self.vocabulary = vocabulary
        self.text = ""
        self.marks: list[Mark] = []
        self.choice = self.new_choice([])

    def new_choice(self, resumed: Sequence[int]) -> OpenChoice:
        stream = TextStream(
            self.vocabulary.tokenizer.decode,
            self.stops,
            added=self.vocabulary.added,
            partial_ids=self.vocabulary.partial_ids,
        )
        return OpenChoice(0, stream, resumed, len(self.text), num_marks=len(self.marks))

    def take(self, text: str) -> None:
        for mark in self.choice.take_marks():
            assert len(self.text) <= mark.position <= len(self.text) + len(text)
            self.marks.append(mark)
        self.text += text

    def push(self, ids: Sequence[int], cuts: list[int]) -> None:
        bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
        for start, end in pairwise(bounds):
            if self.choice.stop is None:
                self.take(self.choice.push(ids[start:end], last_is_textless=False))

    def finish(self) -> "Client":
        if self.choice.stop is None:
            self.take(self.choice.finish())
        return self


def written(
    ids: Sequence[int],
    cuts: list[int],
    stops: Sequence[str] = (),
    vocabulary: Vocabulary = BYTE_LEVEL,
) -> Client:
    client = Client(stops, vocabulary)
    client.push(ids, cuts)
    return client.finish()


@pytest.fixture(scope="module", params=["byte-level", "byte fallback"])
def vocabulary(request: pytest.FixtureRequest, byte_fallback_tokenizer: Tokenizer) -> Vocabulary:
    is_byte_level = request.param == "byte-level"
    return BYTE_LEVEL if is_byte_level else Vocabulary(byte_fallback_tokenizer)


def ids_of(numbers: list[int], vocabulary: Vocabulary) -> list[int]:
    """Every id may occur, and added tokens often do."""
    often = sorted(vocabulary.added)
    size = vocabulary.size
    return [each if each < size else often[each % len(often)] for each in numbers]


@given(PIECES, CUTS)
@example(["a", "<think>", "世", "<|end|>", "</think>"], [])
def test_each_added_token_is_marked_where_it_stands(pieces: list[str], cuts: list[int]):
    ids: list[int] = []
    marks: list[Mark] = []
    text = ""
    for piece in pieces:
        if piece in SHOWN or piece in HIDDEN:
            token_id = TOKENIZER.token_to_id(piece)
            marks.append(Mark(len(text), len(shown(piece)), len(ids), token_id))
            ids.append(token_id)
            text += shown(piece)
        else:
            ids += TOKENIZER.encode(piece).ids
            text += piece
    client = written(ids, cuts)
    assert client.text == text
    assert client.marks == marks


@given(NUMBERS, CUTS, STOPS)
def test_marks_are_the_same_however_the_ids_come(
    vocabulary: Vocabulary, numbers: list[int], cuts: list[int], stops: list[str]
):
    ids = ids_of(numbers, vocabulary)
    client = written(ids, cuts, stops, vocabulary)
    at_once = written(ids, [], stops, vocabulary)
    assert (client.text, client.marks) == (at_once.text, at_once.marks)
    if not stops:
        added = vocabulary.added
        places = [index for index, token_id in enumerate(ids) if token_id in added]
        assert [mark.index for mark in client.marks] == places
        for mark in client.marks:
            text = client.text[mark.position : mark.position + mark.num_chars]
            assert text == added[mark.token_id]


@given(NUMBERS, st.lists(st.integers(0, 120), max_size=3), CUTS, STOPS)
def test_marks_before_and_after_resumptions_are_the_marks(
    vocabulary: Vocabulary,
    numbers: list[int],
    losses: list[int],
    cuts: list[int],
    stops: list[str],
):
    ids = ids_of(numbers, vocabulary)
    client, begin = Client(stops, vocabulary), 0
    for loss in sorted(min(each, len(ids)) for each in losses):
        client.push(ids[begin:loss], cuts)
        begin = loss
        if client.choice.stop is None:
            client.choice = client.new_choice(ids[:loss])
    client.push(ids[begin:], cuts)
    client.finish()
    straight = written(ids, [], stops, vocabulary)
    assert (client.text, client.marks) == (straight.text, straight.marks)


def test_the_token_that_ends_a_text_is_marked_at_its_end(subtests: pytest.Subtests):
    for before in ("abc", "ab世"):
        with subtests.test(before=before):
            client = Client(["zzz", "c!"])
            ids = [*TOKENIZER.encode(before).ids[:-1], IDS["<tool_call>"]]
            client.take(client.choice.push(ids, last_is_textless=True))
            client.finish()
            assert client.text == TOKENIZER.decode(ids[:-1])
            end = Mark(len(client.text), 0, len(ids) - 1, IDS["<tool_call>"])
            assert client.marks == [end]


def test_a_token_whose_text_a_stop_string_cuts_off_has_no_mark(subtests: pytest.Subtests):
    open_, close = IDS["<think>"], IDS["</think>"]
    words = TOKENIZER.encode("fox").ids
    for stop, text, num_marks in (("</think>", "<think>fox", 1), ("x</", "<think>fo", 1)):
        with subtests.test(stop=stop):
            client = written([open_, *words, close, *words], [], [stop])
            assert (client.text, len(client.marks)) == (text, num_marks)
