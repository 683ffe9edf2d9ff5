"""Measures an exported checkpoint on what training never saw and prints the figures as JSON.

python -m models.training.evaluate models/shoal-tiny > figures.json
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from models.training.acceptance import conditional_shares, draft_hits, text_acceptance
from models.training.corpus import Document, common_words, load_documents, split_documents
from models.training.dialogues import TEMPLATES, Template, Turn, draw_turn
from models.training.model import ModelConfig, ShoalTiny
from models.training.oracle import Answer, Oracle, load_weights
from models.training.tokenizer import END_OF_TEXT

WINDOW = 2048
NUM_ITEMS = 30
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 64, 96


def windows(tokenizer: Tokenizer, text: str) -> Iterator[Tensor]:
    """Cut one text into rows of at most WINDOW predicted tokens, each led by an end-of-text."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = tokenizer.encode(text).ids
    for start in range(0, len(ids), WINDOW):
        yield torch.tensor([[end, *ids[start : start + WINDOW]]])


def bits_per_byte(model: ShoalTiny, tokenizer: Tokenizer, documents: list[Document]) -> float:
    """Return the bits that the model needs per byte of the documents."""
    nats = 0.0
    for document in documents:
        for row in windows(tokenizer, document.text):
            hidden = model.model.norm(model.hidden(row[:, :-1]))
            logits = functional.linear(hidden[0], model.model.embed_tokens.weight)
            nats += functional.cross_entropy(logits, row[0, 1:], reduction="sum").item()
    return nats / math.log(2) / sum(len(document.text.encode()) for document in documents)


def draw_turns(template: Template, words: list[str], held_out: bool) -> list[Turn]:
    """Return up to NUM_ITEMS different questions of one side of the split."""
    rng = Random(1)
    drawn = [draw_turn(rng, template, words, held_out) for _ in range(4 * NUM_ITEMS)]
    return list({turn.question: turn for turn in drawn}.values())[:NUM_ITEMS]


def text_prompts(tokenizer: Tokenizer, documents: list[Document]) -> list[list[int]]:
    """Return starts of stretches spread evenly over the held-out files."""
    ids = tokenizer.encode("\n".join(document.text for document in documents)).ids
    stride = (len(ids) - PROMPT_TOKENS) // NUM_PROMPTS
    return [ids[start : start + PROMPT_TOKENS] for start in range(0, NUM_PROMPTS * stride, stride)]


def measure_chat(
    model: ShoalTiny, oracle: Oracle, words: list[str]
) -> tuple[dict[str, dict[str, float]], list[float]]:
    """Return the share of exact answers per template and the acceptance within held-out answers."""
    exact: dict[str, dict[str, float]] = {}
    chains = []
    for name, (template, _) in TEMPLATES.items():
        exact[name] = {}
        for side in ("held_out", "taught"):
            turns = draw_turns(template, words, held_out=side == "held_out")
            answers = oracle.answer([turn.question for turn in turns])
            pairs = zip(turns, answers, strict=True)
            num_exact = sum(turn.answer == answer.text for turn, answer in pairs)
            exact[name][side] = num_exact / len(turns)
            if side == "held_out":
                chains += chat_chains(model, answers)
    return exact, conditional_shares(chains)


def chat_chains(model: ShoalTiny, answers: list[Answer]) -> list[list[bool]]:
    """Return the chains of drafts within greedy answers."""
    chains = []
    for answer in answers:
        chains += draft_hits(model, answer.prompt + answer.ids, len(answer.prompt), None)
    return chains


def evaluate(folder: Path) -> dict[str, Any]:
    """Return all figures of the model card."""
    model = ShoalTiny(ModelConfig()).eval()
    model.load_state_dict(load_weights(folder))
    oracle = Oracle(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    training, held_out = split_documents(load_documents())
    exact_match, chat = measure_chat(model, oracle, common_words(training))
    prompts = text_prompts(tokenizer, held_out)
    acceptance = {
        f"text, {name}": text_acceptance(model, oracle, prompts, NEW_TOKENS, sampled)
        for name, sampled in (("greedy", False), ("temperature 1", True))
    }
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_mtp_parameters": sum(p.numel() for p in model.model.mtp_layers.parameters()),
        "bits_per_byte": bits_per_byte(model, tokenizer, held_out),
        "num_files": len(held_out),
        "num_bytes": sum(len(document.text.encode()) for document in held_out),
        "acceptance": acceptance | {"chat, greedy": chat},
        "num_items": NUM_ITEMS,
        "exact_match": exact_match,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="checkpoint folder that export.py wrote")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        print(json.dumps(evaluate(args.folder), indent=2))


if __name__ == "__main__":
    main()
