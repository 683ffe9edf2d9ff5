"""Every id's bytes, for vocabularies of bytes and of characters."""

from tokenizers import AddedToken, Tokenizer, decoders, models

from services.tokenizer.detokenize import token_bytes
from shared.model_folder import EMBEDDED_MODEL

TEXT = "def f(x):\n\treturn 'Grüße, 世界! 👩‍👩‍👧'"


def test_the_bytes_of_a_texts_ids_are_the_bytes_of_the_text():
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    written = token_bytes(tokenizer, 8192)
    assert b"".join(written[token] for token in tokenizer.encode(TEXT).ids) == TEXT.encode()
    assert written[tokenizer.token_to_id("<|im_end|>")] == b"<|im_end|>"


def test_ids_that_the_tokenizer_lacks_have_no_bytes(tokenizer: Tokenizer):
    written = token_bytes(tokenizer, 400)
    assert len(written) == 400
    assert set(written[tokenizer.get_vocab_size() :]) == {b""}


def test_a_sentence_piece_vocabulary_writes_spaces_and_single_bytes():
    vocabulary = {"<unk>": 0, "▁fish": 1, "<0x0A>": 2, "<0xE4>": 3, "é": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer.add_special_tokens([AddedToken("▁mark", special=True)])
    expected = [b"<unk>", b" fish", b"\n", b"\xe4", "é".encode(), "▁mark".encode()]
    assert token_bytes(tokenizer, 6) == expected
