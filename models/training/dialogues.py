"""A seeded generator of short chats, some of them with tools."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from models.training.corpus import stable_hash
from models.training.shoal_facts import SYSTEM_MESSAGES
from models.training.templates import TEMPLATES, Call, Template, Turn
from models.training.tools import Tool, ask, offer, schema

HELD_OUT_ONE_IN = 20
TOOL_SHARE = 0.25
CALL_SHARE = 0.75  # of the questions in dialogues with tools


@dataclass(frozen=True)
class Message:
    """One chat message, with the names that chat templates use."""

    role: str
    content: str
    tool_calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Dialogue:
    """Messages, and the tools that a client offers with them."""

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()

    def for_template(self) -> dict[str, Any]:
        """Return the arguments of transformers' `apply_chat_template`."""
        conversation = []
        for message in self.messages:
            fields: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.tool_calls:
                calls = [
                    {"name": call.name, "arguments": call.arguments} for call in message.tool_calls
                ]
                fields["tool_calls"] = [{"type": "function", "function": call} for call in calls]
            conversation.append(fields)
        return {"conversation": conversation, "tools": list(self.tools) or None}


def draw_turn(rng: Random, template: Template, words: list[str], held_out: bool) -> Turn:
    """Draw until an item of the wanted side of the split comes up."""
    while True:
        turn = template(rng, words)
        if (stable_hash(turn.key) % HELD_OUT_ONE_IN == 0) == held_out:
            return turn


def call_text(calls: tuple[Call, ...]) -> str:
    """Return the text of calls as the model writes them."""
    texts = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def turn_messages(turn: Turn) -> list[Message]:
    """Return the messages of one turn."""
    messages = [Message("user", turn.question)]
    if turn.calls:
        messages.append(Message("assistant", "", turn.calls))
        messages += [Message("tool", response) for response in turn.responses]
    return [*messages, Message("assistant", turn.answer)]


def any_template(rng: Random) -> Template:
    """Draw one of the templates by their weights."""
    weights = [weight for _, weight in TEMPLATES.values()]
    return rng.choices([template for template, _ in TEMPLATES.values()], weights)[0]


def draw_turns_with_tools(rng: Random, tools: list[Tool], words: list[str]) -> list[Turn]:
    """Return two to four turns; most call one of the tools."""
    turns = []
    for _ in range(rng.choice((2, 3, 4))):
        is_call = rng.random() < CALL_SHARE
        template = partial(ask, rng.choice(tools)) if is_call else any_template(rng)
        turns.append(draw_turn(rng, template, words, held_out=False))
    return turns


def generate_dialogues(seed: int, words: list[str]) -> Iterator[Dialogue]:
    """Yield endless training dialogues of one to three turns, some with a system message."""
    rng = Random(seed)
    while True:
        system = [Message("system", rng.choice(SYSTEM_MESSAGES))] if rng.random() < 0.2 else []
        tools = offer(rng) if rng.random() < TOOL_SHARE else []
        if tools:
            turns = draw_turns_with_tools(rng, tools, words)
        else:
            number = rng.choice((1, 1, 1, 2, 3))
            turns = [
                draw_turn(rng, any_template(rng), words, held_out=False) for _ in range(number)
            ]
        messages = [message for turn in turns for message in turn_messages(turn)]
        yield Dialogue(system + messages, tuple(schema(rng, tool, words, turns) for tool in tools))
