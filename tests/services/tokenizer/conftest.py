from collections.abc import Iterable

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SAMPLE = "Grüße, 世界! 👩‍👩‍👧 naïve café — the quick brown fox jumps over the lazy dog. "


def byte_level_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level BPE so small that most characters outside ASCII span several tokens."""
    return byte_level_tokenizer([SAMPLE], 300)


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> Tokenizer:
    """Llama 2's normalizer and decoder; a character outside the few words is its bytes."""
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁"), ("▁", "世")]
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc世"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *map("".join, merges)])}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer
