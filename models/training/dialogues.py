"""A seeded generator of short chats, with tools and without."""

from collections.abc import Iterator
from random import Random

from models.training.shoal_facts import SYSTEM_MESSAGES
from models.training.tool_dialogues import KINDS, tool_dialogue
from models.training.turns import TEMPLATES, Message, draw_turn

TOOL_SHARE = 0.4


def plain_dialogue(rng: Random, words: list[str]) -> list[Message]:
    """Return one to three questions and answers, sometimes behind a system message."""
    weights = [weight for _, weight in TEMPLATES.values()]
    templates = [template for template, _ in TEMPLATES.values()]
    messages = []
    if rng.random() < 0.2:
        messages.append(Message("system", rng.choice(SYSTEM_MESSAGES)))
    for template in rng.choices(templates, weights, k=rng.choice((1, 1, 1, 2, 3))):
        turn = draw_turn(rng, template, words, held_out=False)
        messages += [Message("user", turn.question), Message("assistant", turn.answer)]
    return messages


def generate_dialogues(seed: int, words: list[str]) -> Iterator[list[Message]]:
    """Yield endless training dialogues."""
    rng = Random(seed)
    kinds = list(KINDS)
    weights = [weight for _, weight in KINDS.values()]
    while True:
        if rng.random() < TOOL_SHARE:
            (kind,) = rng.choices(kinds, weights)
            yield tool_dialogue(rng, kind, words, held_out=False)
        else:
            yield plain_dialogue(rng, words)
