from tokenizers import Tokenizer

from services.tokenizer.text_stream import TextStream


def test_ids_after_the_stop_string_are_neither_text_nor_counted(tokenizer: Tokenizer):
    ids = tokenizer.encode("one two three").ids
    stream = TextStream(tokenizer.decode, ["two"])
    assert stream.push(ids) == "one "
    assert stream.has_stopped
    assert tokenizer.decode(ids[: stream.num_tokens]).endswith("two")
    assert stream.num_tokens < len(ids)


def test_a_stop_string_found_only_when_the_text_ends_still_stops(tokenizer: Tokenizer):
    half = tokenizer.encode("x👩").ids[:-1]
    stream = TextStream(tokenizer.decode, ["\N{REPLACEMENT CHARACTER}"])
    text = stream.push(half)
    assert text + stream.finish() == "x"
    assert stream.has_stopped


def test_text_held_back_comes_out_at_the_end(tokenizer: Tokenizer):
    stream = TextStream(tokenizer.decode, ["dog!"])
    text = stream.push(tokenizer.encode("lazy dog").ids)
    assert text + stream.finish() == "lazy dog"
    assert not stream.has_stopped
