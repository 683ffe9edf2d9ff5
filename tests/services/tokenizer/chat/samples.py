"""Small chat templates with the features of real models', and a conversation for them."""

import json
from pathlib import Path
from typing import Any

from shared.wire.messages import ChatOptions

FOLDER = Path(__file__).parent / "templates"
QWEN, LLAMA, GLM, DEEPSEEK, PARTS = (
    (FOLDER / f"{name}.jinja").read_text() for name in ("qwen", "llama", "glm", "deepseek", "parts")
)
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "glm": GLM, "deepseek": DEEPSEEK}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Das Wetter <heute> für 世界\'s "Städte"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "Wie wird's?"},
    {"role": "assistant", "content": "", "reasoning": "Ask it.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "18 °C"},
    {"role": "assistant", "content": " It is mild. "},
]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def options(**changes: Any) -> ChatOptions:
    """Non-text values are given as JSON."""
    for key in changes.keys() & {"tools", "documents", "template_kwargs"}:
        changes[key] = json.dumps(changes[key])
    return ChatOptions(**changes)
