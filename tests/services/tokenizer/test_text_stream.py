import pytest
from tokenizers import Tokenizer

from services.tokenizer.text_stream import TextStream


def test_ids_after_the_stop_string_are_neither_text_nor_counted(tokenizer: Tokenizer):
    ids = tokenizer.encode("one two three").ids
    stream = TextStream(tokenizer.decode, ["two"])
    assert stream.push(ids) == "one "
    assert stream.stop == "two"
    assert tokenizer.decode(ids[: stream.num_tokens]).endswith("two")
    assert stream.num_tokens < len(ids)


def test_a_stop_string_found_only_when_the_text_ends_still_stops(tokenizer: Tokenizer):
    half = tokenizer.encode("x👩").ids[:-1]
    stream = TextStream(tokenizer.decode, ["\N{REPLACEMENT CHARACTER}"])
    text = stream.push(half)
    assert text + stream.finish() == "x"
    assert stream.stop == "\N{REPLACEMENT CHARACTER}"


def test_text_held_back_comes_out_at_the_end(tokenizer: Tokenizer):
    stream = TextStream(tokenizer.decode, ["dog!"])
    text = stream.push(tokenizer.encode("lazy dog").ids)
    assert text + stream.finish() == "lazy dog"
    assert stream.stop is None


def test_no_stop_string_ends_within_min_tokens(tokenizer: Tokenizer):
    ids = tokenizer.encode("two two two").ids
    num_first = next(n for n in range(len(ids)) if "two" in tokenizer.decode(ids[:n]))
    stream = TextStream(tokenizer.decode, ["two"], min_tokens=num_first)
    assert "".join(stream.push([each]) for each in ids) == "two "
    stream = TextStream(tokenizer.decode, ["two"], min_tokens=num_first - 1)
    assert "".join(stream.push([each]) for each in ids) == ""


@pytest.mark.parametrize("stops", [[], ["zzz"]])
def test_an_id_without_text_counts_and_adds_none(tokenizer: Tokenizer, stops: list[str]):
    ids = tokenizer.encode("one two").ids
    stream = TextStream(tokenizer.decode, stops)
    text = stream.push(ids[:-1]) + stream.push(ids[-1:], last_is_textless=True) + stream.finish()
    assert text == tokenizer.decode(ids[:-1])
    assert stream.num_tokens == len(ids)
