"""Measures an exported checkpoint on held-out data and prints the figures as JSON.

python -m models.training.evaluate models/shoal-tiny > figures.json
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from models.training.acceptance import conditional_shares, draft_hits, text_acceptance
from models.training.checkpoint import load_weights
from models.training.corpus import Document, common_words, load_documents, split_documents
from models.training.dialogues import Dialogue, Message, call_text, draw_turn, turn_messages
from models.training.model import ModelConfig, ShoalTiny
from models.training.oracle import Answer, Oracle
from models.training.templates import TEMPLATES, Template
from models.training.tokenizer import END_OF_TEXT
from models.training.tools import KINDS, SUMS, Kind, ask, offer, schema, spelled

WINDOW = 2048
NUM_ITEMS = 30
SUM_KINDS = [KINDS[name] for name in SUMS]
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 64, 96


def windows(tokenizer: Tokenizer, text: str) -> Iterator[Tensor]:
    """Cut one text into rows of at most WINDOW predicted tokens, each led by an end-of-text."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = tokenizer.encode(text).ids
    for start in range(0, len(ids), WINDOW):
        yield torch.tensor([[end, *ids[start : start + WINDOW]]])


def bits_per_byte(model: ShoalTiny, tokenizer: Tokenizer, documents: list[Document]) -> float:
    """Return the model's bits per byte of the documents."""
    nats = 0.0
    for document in documents:
        for row in windows(tokenizer, document.text):
            hidden = model.model.norm(model.hidden(row[:, :-1]))
            logits = functional.linear(hidden[0], model.model.embed_tokens.weight)
            nats += functional.cross_entropy(logits, row[0, 1:], reduction="sum").item()
    return nats / math.log(2) / sum(len(document.text.encode()) for document in documents)


Item = tuple[Dialogue, str]


def chat_items(template: Template, words: list[str], held_out: bool) -> list[Item]:
    """Return up to NUM_ITEMS different questions of one side of the split, and their answers."""
    rng = Random(1)
    drawn = [draw_turn(rng, template, words, held_out) for _ in range(4 * NUM_ITEMS)]
    different = list({turn.question: turn for turn in drawn}.values())[:NUM_ITEMS]
    return [(Dialogue([Message("user", turn.question)]), turn.answer) for turn in different]


def tool_items(names: list[str], words: list[str], held_out: bool) -> tuple[list[Item], list[Item]]:
    """Return questions with tools (one of `names` fits), paired with the calls, and the
    continuations.

    Continuations are the same dialogues with the calls' responses, paired with the answers.
    """
    rng = Random(1)
    calls, answers = [], []
    for _ in range(NUM_ITEMS):
        tool = spelled(rng, KINDS[rng.choice(names)])
        others = [each for each in offer(rng) if not is_alike(each.kind, tool.kind)]
        turn = draw_turn(rng, partial(ask, tool), words, held_out)
        offered = rng.sample([tool, *others], 1 + len(others))
        tools = tuple(schema(rng, each, words, [turn]) for each in offered)
        messages = turn_messages(turn)
        calls.append((Dialogue(messages[:1], tools), call_text(turn.calls)))
        answers.append((Dialogue(messages[:-1], tools), turn.answer))
    return calls, answers


def is_alike(kind: Kind, other: Kind) -> bool:
    """Return True if a question may be meant for either."""
    return kind == other or (kind in SUM_KINDS and other in SUM_KINDS)


def items(words: list[str], held_out: bool) -> dict[str, list[Item]]:
    """Return the questions on one side of the split, by their name in the card."""
    found = {
        name: chat_items(template, words, held_out) for name, (template, _) in TEMPLATES.items()
    }
    lookups = [name for name in KINDS if name not in SUMS]
    for what, names in (("sum", list(SUMS)), ("lookup", lookups)):
        found[f"{what}: call"], found[f"{what}: answer"] = tool_items(names, words, held_out)
    return found


def text_prompts(tokenizer: Tokenizer, documents: list[Document]) -> list[list[int]]:
    """Return starts of stretches spread evenly over the held-out files."""
    ids = tokenizer.encode("\n".join(document.text for document in documents)).ids
    stride = (len(ids) - PROMPT_TOKENS) // NUM_PROMPTS
    return [ids[start : start + PROMPT_TOKENS] for start in range(0, NUM_PROMPTS * stride, stride)]


def measure_chat(
    model: ShoalTiny, oracle: Oracle, words: list[str]
) -> tuple[dict[str, dict[str, float]], list[float]]:
    """Return the share of exact answers per template and the acceptance within held-out answers."""
    exact: dict[str, dict[str, float]] = defaultdict(dict)
    chains = []
    for side in ("held_out", "taught"):
        for name, asked_items in items(words, held_out=side == "held_out").items():
            answers = oracle.answer([dialogue for dialogue, _ in asked_items])
            pairs = zip(asked_items, answers, strict=True)
            num_exact = sum(expected == answer.text for (_, expected), answer in pairs)
            exact[name][side] = num_exact / len(asked_items)
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
