"""Folders with a tokenizer of sentencepiece, as FastDeploy's users have ERNIE-4.5."""

import json
from pathlib import Path

import sentencepiece

VOCAB_SIZE = 800
CONFIG = '{"model_type": "ernie4_5", "architectures": ["Ernie4_5_ForCausalLM"]}'


def save_sentencepiece(folder: Path, kind: str) -> None:
    """Trains a tokenizer of a ``kind``, ``bpe`` or ``unigram``."""
    corpus = Path(__file__).parents[3] / "docs" / "architecture.md"
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        control_symbols=["<|im_start|>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=kind == "unigram",
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    (folder / "config.json").write_text(CONFIG)
    tokenizer = {
        "tokenizer_class": "Ernie4_5_Tokenizer",
        **{f"{name}_token": text for name, text in (("bos", "<s>"), ("eos", "</s>"))},
        "unk_token": "<unk>",
        "additional_special_tokens": ["<|im_start|>"],
        "chat_template": "{{ messages[0].content }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
