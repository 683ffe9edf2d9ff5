"""Prompts from texts held out of training, for benchmarks that depend on content."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from models.training.corpus import load_documents, split_documents
from models.training.evaluate import text_prompts
from shared.model_folder import EMBEDDED_MODEL


def held_out_prompts(folder: Path = EMBEDDED_MODEL) -> list[list[int]]:
    """Ids of the model in ``folder``, 64 per prompt, from files held out of its training."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    _, held_out = split_documents(load_documents())
    return text_prompts(tokenizer, held_out)


def write_trace(path: Path, num: int, max_tokens: int) -> None:
    """Writes a trace for ``shoal bench serve --trace``: ``num`` requests that repeat the
    prompts."""
    prompts = held_out_prompts()
    lines = [{"prompt": prompts[i % len(prompts)], "max_tokens": max_tokens} for i in range(num)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
