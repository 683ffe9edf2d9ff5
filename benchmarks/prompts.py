"""Beginnings of texts that the embedded model has never seen, for what depends on what it says."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from models.training.corpus import load_documents, split_documents
from models.training.evaluate import text_prompts
from shared.model_folder import EMBEDDED_MODEL


def held_out_prompts() -> list[list[int]]:
    """Ids, 64 of each, from files that were held out of its training."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    _, held_out = split_documents(load_documents())
    return text_prompts(tokenizer, held_out)


def write_trace(path: Path, num: int, max_tokens: int) -> None:
    """As ``shoal bench serve --trace`` reads it: ``num`` requests, prompts again and again."""
    prompts = held_out_prompts()
    lines = [{"prompt": prompts[i % len(prompts)], "max_tokens": max_tokens} for i in range(num)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
