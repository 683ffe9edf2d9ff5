from collections.abc import Iterable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
