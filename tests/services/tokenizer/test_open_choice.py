"""A resumed choice continues its output, without repetition."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.tokenizer.open_choice import OpenChoice
from services.tokenizer.text_stream import TextStream
from tests.services.tokenizer.conftest import SAMPLE, byte_level_tokenizer

TOKENIZER: Tokenizer = byte_level_tokenizer([SAMPLE], 300)


def new_choice(stops: list[str], resumed: list[int], num_chars: int) -> OpenChoice:
    return OpenChoice(0, TextStream(TOKENIZER.decode, stops), resumed, num_chars)


def write(choice: OpenChoice, ids: list[int], cuts: list[int]) -> str:
    """Pushes ``ids`` in pieces until a stop string."""
    text = ""
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for start, end in pairwise(bounds):
        if choice.stop is None:
            text += choice.push(ids[start:end], last_is_textless=False)
    return text


@given(
    st.lists(st.integers(1, 299), max_size=200),
    st.integers(0, 200),
    st.lists(st.integers(0, 200), max_size=6),
    st.sampled_from([[], ["e"], ["fox j", "zy"]]),
)
def test_text_before_and_after_a_resumption_is_the_text(
    ids: list[int], num_before: int, cuts: list[int], stops: list[str]
):
    straight = new_choice(stops, [], 0)
    whole = write(straight, ids, [])
    whole += straight.finish() if straight.stop is None else ""
    num_before = min(num_before, len(ids))
    first = new_choice(stops, [], 0)
    delivered = write(first, ids[:num_before], cuts)
    if first.stop is not None:
        assert delivered == whole
        return
    second = new_choice(stops, ids[:num_before], len(delivered))
    assert second.num_tokens == num_before
    delivered += write(second, ids[num_before:], cuts)
    delivered += second.finish() if second.stop is None else ""
    assert delivered == whole
    assert second.num_tokens == straight.num_tokens


def test_a_long_text_that_was_cut_inside_a_character_goes_on_with_it():
    ids = TOKENIZER.encode("x " * 80 + "é").ids
    straight, cut = new_choice([], [], 0), len(ids) - 1
    before = write(straight, ids[:cut], [])
    resumed = new_choice([], ids[:cut], len(before))
    assert before + write(resumed, ids[cut:], []) + resumed.finish() == "x " * 80 + "é"
